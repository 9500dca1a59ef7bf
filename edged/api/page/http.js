// Requests to the daemon: the API key, errors in the daemon's words, and server-sent events.
//
// A 401 asks for a key once, however many requests wait for it, and each of them is then sent again.

const KEY = "edged-key";

export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
  }
}

let asking = null; // the question that is open, as a promise

/** The key that the person gives; `why` says what was wrong with the last one. */
function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const form = document.getElementById("key-form");
    const input = document.getElementById("key");
    if (why) document.getElementById("key-why").textContent = why;
    const keepOpen = (event) => event.preventDefault();
    dialog.addEventListener("cancel", keepOpen);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      dialog.removeEventListener("cancel", keepOpen);
      dialog.close();
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** One request. Throws Refusal for an answer of 400 and above, TypeError when there is no connection. */
export async function send(method, path, body, { signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.ok) return response;
    const answer = await response.json().catch(() => ({}));
    if (response.status !== 401) throw new Refusal(response.status, answer.error);
    // Another request may have got a new key while this one was under way.
    if (sessionStorage.getItem(KEY) === key) await askForKey(key ? `${answer.error?.message}. Give another one.` : "");
  }
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body = {}) => (await send("POST", path, body)).json();

/** The server-sent events of a response, as { name, data } with data parsed; comments are { name: "" }. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const frames = buffer.split("\n\n");
      buffer = frames.pop();
      for (const frame of frames) yield parseFrame(frame);
    }
  } finally {
    reader.cancel().catch(() => {}); // already broken: there is nothing left to cancel
  }
}

function parseFrame(frame) {
  let name = "message";
  let text = "";
  for (const line of frame.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) text += line.slice(6);
  }
  if (!text) return { name: "", data: null };
  return text === "[DONE]" ? { name: "done", data: null } : { name, data: JSON.parse(text) };
}
