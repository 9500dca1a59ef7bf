// The page: starts its parts and keeps them fresh, by the daemon's events or, while those do not come, by asking.

import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { events, send } from "./http.js";
import { refresh, showProgress, startLearning } from "./learning.js";

const SETTLE_MS = 150; // events come in bursts: one refresh for all of them
const POLL_MS = 3000;
const SILENCE_MS = 40_000; // the server says something at least every 15 s

let settling = null;

function refreshSoon() {
  settling ??= setTimeout(async () => {
    settling = null;
    try {
      await refresh();
      showLink("on", "connected");
    } catch (error) {
      showLink("off", error.status ? error.message : "not connected");
    }
  }, SETTLE_MS);
}

function showLink(state, text) {
  byId("link").className = `link ${state}`;
  byId("link-text").textContent = text;
}

async function follow() {
  const controller = new AbortController();
  let watchdog = null;
  const heard = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
  };
  try {
    heard();
    const response = await send("GET", "/v1/events", undefined, { signal: controller.signal });
    refreshSoon(); // what happened before the stream began
    for await (const { name, data } of events(response)) {
      heard();
      if (name === "progress") showProgress(data);
      else if (name) refreshSoon();
    }
  } finally {
    clearTimeout(watchdog);
  }
}

async function run() {
  for (;;) {
    // However the stream ends, by the server's restart or a lost connection, the answer is to ask and to try again.
    await follow().catch(() => {});
    refreshSoon();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

startLearning();
startChat(refreshSoon);
refreshSoon();
run();
