// How a metric is distributed over clients in a chosen round, one histogram per algorithm, all on one axis.

import { cellChoices, phaseOf, reads as readClients } from "./clients.js";
import { clientName, colour, el, read, shown, svg, tick } from "./dom.js";
import { onTick, ticks } from "./chart.js";

/** @typedef {import("./page.js").Context} Context */

const BINS = 30;

/** @param {Context} context @returns {Promise<[any, any]>} */
export const reads = (context) => {
  const { metric, seed, round, run } = context.state;
  const phase = phaseOf(context, false);
  return Promise.all([read(`runs/${run}/distribution`, { metric, phase, seed, ...(round === null ? {} : { round }) }), readClients(context, false)]);
};

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const { redo, state } = context;
  const slider = el("input", { type: "range", min: 1, max: 1, value: 1, oninput: () => { state.round = Number(slider.value); latest.querySelector("input").checked = false; redo(); } });
  const which = el("span");
  const latest = /** @type {any} */ (tick("The latest", state.round === null, (on) => { state.round = on ? null : Number(slider.value); redo(); }));
  const choices = cellChoices(context, false);
  choices.splice(context.runChoice().length, 1); // all algorithms are shown
  const rows = el("div", { class: "rows" });
  into.replaceChildren(el("div", { class: "bar" }, ...choices, el("label", {}, which, slider), latest), rows);

  async function update() {
    const run = context.run();
    const last = Math.max(...run.cells.map((cell) => cell.rounds_done), 1);
    slider.max = String(last);
    slider.value = String(state.round ?? last);
    which.textContent = `Round ${state.round ?? last}`;
    const [found, table] = await reads(context);
    const metric = context.metrics().find((one) => one.name === state.metric);
    const all = found.lines.flatMap((/** @type {any} */ line) => line.values);
    if (!all.length) { rows.replaceChildren(el("p", { class: "note" }, "Nothing has been measured at clients yet.")); return; }
    const [low, high] = metric?.share ? [0, 1] : [all.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.min(a, b)), all.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.max(a, b))];
    const span = high - low || 1;
    const styles = new Map(run.labels.map((style) => [style.label, style]));
    rows.replaceChildren(...found.lines.map((/** @type {any} */ line) => {
      const counts = new Array(BINS).fill(0);
      for (const value of line.values) counts[Math.min(Math.floor(((value - low) / span) * BINS), BINS - 1)] += 1;
      const most = Math.max(...counts);
      const sorted = line.values.map((/** @type {number} */ value, /** @type {number} */ place) => ({ value, client: line.clients[place] })).sort((/** @type {any} */ a, /** @type {any} */ b) => (metric?.up === false ? b.value - a.value : a.value - b.value));
      const mean = line.values.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / line.values.length;
      const width = Math.max(rows.clientWidth, 280);
      const x = (/** @type {number} */ value) => 8 + ((value - low) / span) * (width - 16);
      const fill = colour(/** @type {any} */ (styles.get(line.label)));
      const tenth = sorted[Math.floor(0.1 * (sorted.length - 1))].value;
      const words = `${line.values.length} clients in round ${line.round}: mean ${shown(mean, metric)}, worst tenth up to ${shown(tenth, metric)}, worst ${shown(sorted[0].value, metric)} at ${clientName(table.names[sorted[0].client], sorted[0].client)}`;
      const drawing = svg("svg", { viewBox: `0 0 ${width} 76`, preserveAspectRatio: "none", role: "img", "aria-label": `${line.label}: ${words}` });
      counts.forEach((count, bin) => { if (count) drawing.append(svg("rect", { x: x(low + (bin / BINS) * span) + 1, width: Math.max((width - 16) / BINS - 2, 1), y: 54 - (42 * count) / most, height: (42 * count) / most, fill }, svg("title", {}, `${shown(low + (bin / BINS) * span, metric)} to ${shown(low + ((bin + 1) / BINS) * span, metric)}: ${count} clients`))); });
      drawing.append(svg("line", { x1: 8, x2: width - 8, y1: 54.5, y2: 54.5, stroke: "currentColor", "stroke-opacity": 0.5 }), svg("line", { x1: x(mean), x2: x(mean), y1: 0, y2: 56, stroke: "currentColor", "stroke-width": 2 }));
      for (const at of ticks({ low, high }, Math.max(3, Math.min(10, width / 90)))) drawing.append(svg("text", { x: x(at), y: 70, "text-anchor": x(at) < 30 ? "start" : x(at) > width - 40 ? "end" : "middle" }, onTick(at, metric)));
      return el("div", {}, el("h2", {}, line.label), el("p", { class: "note" }, words), drawing);
    }));
  }
  return update;
}
