// Curves of every algorithm and seed, with their intervals; several runs side by side on the same axes.

import { AXES, drawLines, ranges } from "./chart.js";
import { age, byId, choice, el, MOST, read, shown, tick } from "./dom.js";

/** @typedef {import("./page.js").Context} Context */
/** @typedef {import("./chart.js").AxisName} AxisName */

/** @typedef {{lines: any[], caption: string, order: string[], about: string, crowded: boolean, final: string, universal: string, age: number}} Curves */

/** What the page has of each run's curves: a run that goes on sends only the points that follow. @type {Map<string, Curves>} */
const known = new Map();

/** @param {Context} context @returns {Promise<Curves[]>} */
export const reads = ({ overviews, state }) => Promise.all(overviews.map(async (_, number) => {
  const query = { metric: state.metric, panel: state.panel, axis: state.axis, each_seed: state.eachSeed };
  const [path, now] = [`runs/${number}/curves`, age()];
  const place = JSON.stringify([path, query]);
  const before = known.get(place);
  if (before?.age === now) return before;
  const found = await read(path, { ...query, known: before?.lines.map((line) => [line, ...line.seeds].map((one) => one.mark).join(";")).join(",") ?? "" });
  const grown = { ...found, lines: found.lines.map((/** @type {any} */ line, /** @type {number} */ at) => joined(before?.lines[at], line)), age: now };
  if (known.size >= MOST) known.clear();
  known.set(place, grown);
  return grown;
}));

/** A line, and those of its seeds, with the points that follow those they have. @param {any} before @param {any} line @returns {any} */
function joined(before, line) {
  const seeds = line.seeds?.map((/** @type {any} */ one, /** @type {number} */ at) => joined(before?.seeds[at], one));
  if (!line.kept) return { ...line, seeds };
  /** @param {any[]} old @param {any[]} more */
  const join = (old, more) => [...old.slice(0, line.kept), ...more];
  const x = Object.fromEntries(Object.keys(line.x).map((axis) => [axis, join(before.x[axis], line.x[axis])]));
  const sides = ["mean", "low", "high"].filter((side) => side in line).map((side) => [side, join(before[side], line[side])]);
  return { ...line, x, ...Object.fromEntries(sides), seeds };
}

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const { state } = context;
  const bar = el("div", { class: "bar" });
  const grid = el("div", { class: "runs" });
  into.replaceChildren(bar, grid);
  const { redo } = context;
  bar.append(
    choice("Metric", context.metrics().map((one) => [one.name, one.name]), state.metric, (value) => { state.metric = value; redo(); }),
    choice("Measured", Object.entries(context.panels()), state.panel, (value) => { state.panel = value; redo(); }),
    choice("Against", /** @type {[string, string][]} */ (Object.entries(AXES)), state.axis, (value) => { state.axis = /** @type {AxisName} */ (value); redo(); }),
    tick("Intervals", state.bands, (on) => { state.bands = on; redo(); }),
    tick("Every seed", state.eachSeed, (on) => { state.eachSeed = on; redo(); }),
  );
  const boxes = context.overviews.map((run) => {
    const box = { title: context.overviews.length > 1 ? el("h2", {}, run.name) : "", cautions: el("p", { hidden: true }), chart: el("div"), caption: el("p", { class: "note" }), about: el("p", { class: "note" }), table: el("div", { class: "scroll" }) };
    grid.append(el("div", {}, box.title, box.cautions, box.chart, box.caption, box.about, box.table));
    return box;
  });

  /** A finished run has its cautions above the curves. A running one would have to be asked in every round. @param {HTMLElement} into @param {number} number */
  async function caution(into, number) {
    const finished = () => context.overviews[number].finished;
    const { cautions, harm } = finished() ? await read(`runs/${number}/settings`) : { cautions: [], harm: [] };
    const words = harm[0] ?? (cautions.length === 1 ? "1 caution" : `${cautions.length} cautions`) + ": read before you trust these numbers";
    into.hidden = !cautions.length || !finished();
    if (!into.hidden) into.replaceChildren(el("button", { type: "button", class: "link", onclick: () => byId("tab-settings").click() }, words));
  }

  async function update() {
    const found = await reads(context);
    const metric = context.metrics().find((one) => one.name === state.metric);
    const has = found.every((one) => one.lines.every((/** @type {any} */ line) => [line, ...line.seeds].every((part) => state.axis in part.x)));
    const axis = has ? state.axis : "rounds";
    const visible = found.flatMap((one) => one.lines).filter((line) => !state.hidden.has(line.label));
    const range = found.length > 1 && visible.length ? ranges(visible, axis) : undefined;
    found.forEach((one, number) => {
      const box = boxes[number];
      const run = context.overviews[number];
      void caution(box.cautions, number).catch(context.fail);
      const styles = new Map(run.labels.map((style) => [style.label, style]));
      const title = `${state.metric} of ${run.name}, ${(context.panels()[state.panel] ?? "").toLowerCase()}`;
      drawLines(box.chart, { lines: one.lines, styles, axis, metric, title, bands: state.bands && !one.crowded, hidden: state.hidden, range, toggle: (label) => { if (!state.hidden.delete(label)) state.hidden.add(label); redo(); } });
      const lacking = has ? "" : ` ${AXES[state.axis]}: not measured in ${found.length > 1 ? "every run" : "this run"}, so rounds are shown.`;
      box.caption.textContent = one.lines.length ? one.caption + lacking : "Nothing has been measured yet.";
      const rows = one.lines.filter((line) => line.mean.length).map((line) => ({ line, last: line.mean.length - 1 }));
      rows.sort((a, b) => one.order.indexOf(a.line.label) - one.order.indexOf(b.line.label));
      box.about.textContent = one.about;
      if (one.final) box.about.textContent += " The final model is measured after the last aggregation, at the end of the seeds that are done.";
      if (one.universal) box.about.textContent += ` “Universal test” has each client’s model ${one.universal.replace(", universal test", "")} on the tests of all clients, at the end of the seeds that are done.`;
      const body = rows.map(({ line, last }) => {
        const [low, high] = [line.low[last], line.high[last]];
        return el("tr", {}, el("th", { class: "text", scope: "row" }, line.label), el("td", {}, line.x.rounds[last]), el("td", {}, shown(line.mean[last], metric)), el("td", {}, high > low ? `${shown(low, metric)} to ${shown(high, metric)}` : "–"), ...(one.final ? [el("td", {}, shown(line.final, metric))] : []), ...(one.universal ? [el("td", {}, shown(line.universal, metric))] : []), el("td", {}, line.count));
      });
      const head = ["algorithm", "round", state.metric, "band", ...(one.final ? [one.final] : []), ...(one.universal ? ["universal test"] : []), "seeds"].map((words, place) => el("th", { class: place ? "" : "text", scope: "col" }, words));
      box.about.hidden = !rows.length;
      box.table.replaceChildren(rows.length ? el("table", { "aria-label": "The last round" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)) : "");
    });
  }
  return update;
}
