// The reward curve: mean reward of each update's batch, as an SVG that scales with its card.

import { element, svg } from "./dom.js";

const WIDTH = 360, HEIGHT = 150, LEFT = 34, RIGHT = 8, TOP = 8, BOTTOM = 20;

/** A figure for `points`: { id, reward, verdict, text } in order of id. */
export function rewardChart(points) {
  if (points.length === 0) return element("p", {}, "The curve starts with the first update.");
  const [low, high] = bounds(points.map((point) => point.reward));
  const first = points[0].id, last = points.at(-1).id;
  const x = (id) => LEFT + (last === first ? 0.5 : (id - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (reward) => TOP + ((high - reward) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const path = points.map((p, i) => `${i ? "L" : "M"}${x(p.id).toFixed(1)} ${y(p.reward).toFixed(1)}`).join("");
  const foot = y(low);
  const label = `Mean reward of ${points.length} updates, from ${signed(points[0].reward)} to ${signed(points.at(-1).reward)}`;
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const tick of [high, (high + low) / 2, low]) {
    chart.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, signed(tick, 1)));
  }
  if (low < 0 && high > 0) chart.append(svg("line", { class: "zero", x1: LEFT, x2: WIDTH - RIGHT, y1: y(0), y2: y(0) }));
  chart.append(svg("text", { x: x(first), y: HEIGHT - 4, "text-anchor": last === first ? "middle" : "start" }, `update ${first}`));
  if (last !== first) chart.append(svg("text", { x: x(last), y: HEIGHT - 4, "text-anchor": "end" }, String(last)));
  if (points.length > 1) {
    chart.append(
      svg("path", { class: "area", d: `${path}L${x(last)} ${foot}L${x(first)} ${foot}Z` }),
      svg("path", { class: "curve", d: path }));
  }
  const radius = points.length > 60 ? 2 : 4;
  for (const point of points) {
    const kind = point.verdict === "published" ? "published" : "refused";
    chart.append(svg("circle", { class: kind, cx: x(point.id), cy: y(point.reward), r: radius }, svg("title", {}, point.text)));
  }
  return chart;
}

/** A range with some room around the values, within -1 and 1 and at least 0.4 wide. */
function bounds(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(0.05, (0.4 - (high - low)) / 2);
  const step = (value, round) => round(value * 5) / 5;
  return [Math.max(-1, step(low - room, Math.floor)), Math.min(1, step(high + room, Math.ceil))];
}

export function signed(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
}
