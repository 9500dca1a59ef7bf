// The chat: questions, streamed answers, thumbs and corrections. The conversation lives in this page only.

import { byId, element, svg, toast } from "./dom.js";
import { events, post, Refusal, send } from "./http.js";

const TEMPERATURE = 0.7; // the model learns from sampled answers, not from greedy ones
const STARTERS = ["Why is the sky blue?", "How do I keep basil alive?", "Give me an idea for dinner."];
const THUMB = "M7 11v9H4v-9zm0 0l4-8a2.2 2.2 0 0 1 2 2.2V9h5.2a2 2 0 0 1 2 2.3l-1.1 7a2 2 0 0 1-2 1.7H7";

const emptyState = byId("empty");
const conversation = [];
let running = null; // AbortController of the answer that streams
let rated = () => {};

export function startChat(onRated) {
  rated = onRated;
  const question = byId("question");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(question.value.trim());
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask(question.value.trim());
    }
  });
  question.addEventListener("input", () => fit(question));
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", clear);
  for (const text of STARTERS) {
    byId("starters").append(element("button", { type: "button", on: { click: () => ask(text) } }, text));
  }
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function clear() {
  running?.abort();
  conversation.length = 0;
  byId("turns").replaceChildren(emptyState);
  byId("question").focus();
}

async function ask(text) {
  if (!text || running) return;
  const question = byId("question");
  question.value = "";
  fit(question);
  emptyState.remove();
  conversation.push({ role: "user", content: text });
  addTurn("person", element("div", { class: "says" }, text));
  await answer();
}

/** Stream the answer to the conversation as it stands. */
async function answer() {
  const says = element("div", { class: "says" });
  const turn = addTurn("model-turn", says);
  turn.classList.add("streaming");
  const turns = [...conversation];
  const controller = new AbortController();
  setRunning(controller);
  let text = "", id = "", version = "";
  try {
    const body = { model: "default", messages: turns, temperature: TEMPERATURE, stream: true };
    const response = await send("POST", "/v1/chat/completions", body, { signal: controller.signal });
    version = response.headers.get("x-edged-adapter-version");
    for await (const { name, data } of events(response)) {
      if (name === "done") break;
      if (!data) continue;
      if (data.error) throw new Refusal(503, data.error);
      id = data.id;
      text += data.choices[0]?.delta?.content ?? "";
      following(() => { says.textContent = text; });
    }
  } catch (error) {
    if (error.name !== "AbortError") turn.append(failure(error));
  }
  turn.classList.remove("streaming");
  setRunning(null);
  if (!text) says.textContent = "…";
  if (id) {
    conversation.push({ role: "assistant", content: text });
    following(() => turn.append(ratingBar(id, version)));
  } else {
    conversation.pop(); // the question has no answer: it is not part of what is asked next
  }
  byId("question").focus({ preventScroll: true });
}

function failure(error) {
  const why = error instanceof Refusal ? error.message : "the connection to the server was lost";
  return element("p", { class: "failed", role: "alert" }, why);
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
}

function addTurn(kind, ...children) {
  const turn = element("div", { class: `turn ${kind}` }, ...children);
  const turns = byId("turns");
  turns.append(turn);
  turns.scrollTop = turns.scrollHeight;
  return turn;
}

/** Change the conversation and stay at its end, unless the person has scrolled up to read. */
function following(change) {
  const turns = byId("turns");
  const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
  change();
  if (atEnd) turns.scrollTop = turns.scrollHeight;
}

function ratingBar(id, version) {
  const up = thumb("up", "Good answer");
  const down = thumb("down", "Bad answer");
  const said = element("span", { class: "acknowledged", role: "status" });
  const correct = element("button", { type: "button", class: "quiet" }, "Correct it");
  const bar = element("div", { class: "verdict" }, up, down, correct, said, element("span", { title: "the adapter version that answered" }, `v${version}`));
  const give = async (feedback) => {
    try {
      const stored = await post("/v1/feedback", { completion_id: id, source: "page", ...feedback });
      up.setAttribute("aria-pressed", String(stored.rating > 0));
      down.setAttribute("aria-pressed", String(stored.rating < 0));
      said.textContent = stored.replaces ? "Changed" : "Saved";
      rated();
      return true;
    } catch (error) {
      toast(error.message);
      return false;
    }
  };
  let rating = null;
  const press = (value) => async () => {
    if (await give({ rating: value })) rating = value;
  };
  up.addEventListener("click", press("up"));
  down.addEventListener("click", press("down"));
  correct.addEventListener("click", () => {
    correct.hidden = true;
    following(() => bar.after(correctionForm(async (text) => {
      const feedback = rating === null ? { correction: text } : { correction: text, rating };
      return give(feedback);
    }, () => { correct.hidden = false; correct.focus(); })));
  });
  return bar;
}

function thumb(direction, label) {
  const icon = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: THUMB }));
  return element("button", { type: "button", class: `thumb ${direction}`, "aria-label": label, "aria-pressed": "false", title: label }, icon);
}

let corrections = 0;

function correctionForm(save, close) {
  const id = `correction-${++corrections}`;
  const area = element("textarea", { id, rows: "3", placeholder: "What would a better answer say?" });
  const cancel = element("button", { type: "button", class: "quiet" }, "Cancel");
  const form = element("form", { class: "correction" },
    element("label", { for: id }, "A better answer"), area,
    element("div", { class: "row" }, element("button", { type: "submit", class: "primary" }, "Save"), cancel));
  const done = () => { form.remove(); close(); };
  cancel.addEventListener("click", done);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (area.value.trim() && await save(area.value.trim())) done();
  });
  queueMicrotask(() => area.focus());
  return form;
}
