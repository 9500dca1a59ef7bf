// What the model learns: the learner's state, the reward curve, updates, and versions with the operator's buttons.

import { rewardChart, signed } from "./chart.js";
import { byId, element, toast } from "./dom.js";
import { get, post } from "./http.js";

const UPDATES_SHOWN = 200;
const VERSIONS_SHOWN = 50;
const REWARD = "reward/mean";
const STAGES = {
  idle: ["idle", ""], collecting: ["collecting", ""], waiting_for_contrast: ["needs contrast", "held"],
  training: ["training", "busy"], gating: ["checking", "busy"], paused: ["paused", "held"],
};

let live = null; // the live version, as the last answer told it

export function startLearning() {
  byId("train").addEventListener("click", () => act(async () => {
    const { accepted, reason } = await post("/v1/train");
    toast(accepted ? "An update starts now" : `No update now: ${reason}`);
  }));
  byId("pause").addEventListener("click", (event) => act(() => post(event.target.dataset.path)));
  byId("rollback").addEventListener("click", () => act(async () => {
    const now = await post("/v1/adapters/rollback", { if_live: live });
    toast(`v${now.version} is live`);
  }));
}

/** Fetch and show everything. Throws what the requests throw. */
export async function refresh() {
  const [status, updates, adapters] = await Promise.all([
    get("/v1/status"), get(`/v1/updates?limit=${UPDATES_SHOWN}`), get("/v1/adapters")]);
  live = adapters.live.version;
  showHead(status, adapters.live);
  showLearner(status.learner);
  showCurve(updates.data);
  showUpdates(updates.data, status.learner);
  showVersions(adapters);
}

/** `stage done/total` of a running update, between refreshes. */
export function showProgress({ stage, done, total }) {
  if (!stage) return;
  byId("learner-text").textContent = total ? `${capital(stage)}: ${done} of ${total}` : capital(stage);
  showMeter(total ? done / total : null);
}

async function act(work) {
  try {
    await work();
    await refresh();
  } catch (error) {
    toast(error.message);
  }
}

function showHead(status, now) {
  byId("model").textContent = status.model.name;
  byId("live").hidden = false;
  byId("live").textContent = `v${now.version} live${now.pinned ? ", pinned" : ""}`;
  byId("live").title = `since ${new Date(now.since).toLocaleString()}`;
}

function showLearner(learner) {
  const [word, tone] = STAGES[learner.state] ?? [learner.state, ""];
  byId("learner-state").textContent = word;
  byId("learner-state").className = `pill ${tone}`;
  byId("learner-text").textContent = learnerSentence(learner);
  const missing = learner.ratings_until_update ?? 0;
  const counting = (learner.state === "idle" || learner.state === "collecting") && learner.batch_ratings > 0;
  showMeter(counting ? Math.max(0, 1 - missing / learner.batch_ratings) : null);
  if (learner.progress) showProgress(learner.progress);
  const paused = learner.state === "paused";
  byId("pause").textContent = paused ? "Resume" : "Pause";
  byId("pause").dataset.path = paused ? "/v1/resume" : "/v1/pause";
  byId("train").disabled = paused || learner.state === "training" || learner.state === "gating";
  const practice = learner.practice;
  byId("practice").hidden = !practice || practice.state === "off";
  if (practice) byId("practice").textContent = practiceSentence(practice);
  const last = learner.last_update;
  const trouble = last && (last.verdict === "refused" || last.verdict === "failed");
  byId("last-refusal").hidden = !trouble;
  if (trouble) byId("last-refusal").textContent = `The last candidate (v${last.version}) was ${last.verdict === "failed" ? "not made" : "refused"}: ${last.reason}`;
}

function practiceSentence({ state, why, judged, updates }) {
  const sofar = `${judged} of its own answers judged, ${updates} ${updates === 1 ? "update" : "updates"} of them so far.`;
  switch (state) {
    case "limit": return `Practice waits for a rating of yours. ${capital(sofar)}`;
    case "waiting": return `Practice waits: ${why}. ${capital(sofar)}`;
    default: return `Practising while nobody asks (${state}). ${capital(sofar)}`;
  }
}

function learnerSentence(learner) {
  const missing = learner.ratings_until_update ?? 0;
  switch (learner.state) {
    case "paused": return "Paused. Ratings are kept; nothing is learned until you resume.";
    case "waiting_for_contrast": return "All new ratings are equal. Rate some answers the other way.";
    case "training": return "Learning from the ratings…";
    case "gating": return "Checking the candidate before it answers anybody…";
    default: return missing > 0 ? `${missing} more ${missing === 1 ? "rating" : "ratings"} until the next update` : "Ready for the next update";
  }
}

function showMeter(share) {
  byId("meter").hidden = share === null;
  if (share !== null) byId("meter-fill").style.width = `${Math.round(100 * share)}%`;
}

function showCurve(updates) {
  const points = updates
    .filter((update) => update.state === "finished" && Number.isFinite(update.metrics[REWARD]))
    .map((update) => ({
      id: update.id, reward: update.metrics[REWARD], verdict: update.verdict,
      text: `update ${update.id}: ${signed(update.metrics[REWARD])}, ${update.verdict}`,
    }))
    .sort((a, b) => a.id - b.id);
  byId("chart").replaceChildren(rewardChart(points));
  byId("reward-now").textContent = points.length ? `now ${signed(points.at(-1).reward)}` : "";
}

function showUpdates(updates, learner) {
  byId("updates-total").textContent = learner.updates_total ? `${learner.updates_total} in all` : "";
  byId("updates").replaceChildren(...(updates.length ? updates.map(updateRow) : [nothing("None yet. Rate some answers.")]));
}

function updateRow(update) {
  const finished = update.state === "finished";
  const [word, tone] = finished
    ? [update.verdict, update.verdict === "published" ? "good" : update.verdict === "skipped" ? "" : "bad"]
    : [update.state === "gating" ? "checking" : update.state, "wait"];
  const facts = [];
  const reward = update.metrics[REWARD];
  if (Number.isFinite(reward)) facts.push(`mean reward ${signed(reward)}`);
  facts.push(update.origin === "practice" ? `${update.judged} answers of practice`
    : `${update.ratings} ratings${update.replayed ? ` and ${update.replayed} older` : ""}`);
  if (finished && update.finished_at) facts.push(`${(update.finished_at - update.created_at).toFixed(1)} s`);
  return element("li", {},
    element("span", { class: "what" }, `Update ${update.id}`, element("span", { class: `badge ${tone}` }, word)),
    element("span", { class: "figure" }, update.verdict === "published" ? `v${update.version}` : ""),
    element("span", { class: "more" }, facts.join(" · ")),
    finished && update.verdict !== "published" && update.reason ? element("span", { class: "more why" }, update.reason) : null);
}

function showVersions({ live: now, data }) {
  const newest = [...data].sort((a, b) => b.version - a.version).slice(0, VERSIONS_SHOWN);
  byId("versions").replaceChildren(...newest.map((adapter) => versionRow(adapter, now)));
  byId("rollback").disabled = now.version === 0;
}

function versionRow(adapter, now) {
  const badges = [];
  if (adapter.live) badges.push(["live", "good"]);
  if (adapter.live && now.pinned) badges.push(["pinned", "wait"]);
  if (adapter.kept) badges.push(["kept", ""]);
  if (adapter.verdict === "rolled_back") badges.push(["rolled back", "bad"]);
  if (adapter.state !== "published") badges.push([adapter.state, adapter.state === "refused" ? "bad" : "wait"]);
  const name = adapter.version === 0 ? "v0 · the base model" : `v${adapter.version}`;
  const promote = () => act(async () => {
    const after = await post(`/v1/adapters/${adapter.version}/promote`, { if_live: live });
    toast(`v${after.version} is live`);
  });
  if (adapter.collected_at) badges.push(["collected", ""]);
  const button = adapter.state === "published" && !adapter.live && !adapter.collected_at
    ? element("button", { type: "button", "aria-label": `Promote v${adapter.version}`, on: { click: promote } }, "Promote") : "";
  const origin = { trained: "trained here", imported: "imported", fleet: "from the fleet", base: "" }[adapter.origin] ?? adapter.origin;
  const facts = adapter.version === 0 ? [] : [origin, new Date(1000 * adapter.created_at).toLocaleString()];
  return element("li", {},
    element("span", { class: "what" }, name, ...badges.map(([word, tone]) => element("span", { class: `badge ${tone}` }, word))),
    element("span", {}, button),
    facts.length ? element("span", { class: "more" }, facts.join(" · ")) : null,
    against(adapter) ? element("span", { class: "more why" }, against(adapter)) : null);
}

/** What speaks against a version that was refused or rolled back. */
const against = ({ state, reason, verdict, verdict_reason }) =>
  state === "refused" ? reason : verdict === "rolled_back" ? verdict_reason : null;

const nothing = (text) => element("li", {}, element("span", { class: "none" }, text));
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1).replaceAll("_", " ");
