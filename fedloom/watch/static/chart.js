// A chart of lines with bands: axes, a legend whose entries hide lines, and a read-out for pointer and keyboard.

import { brief, bytes, colour, duration, el, redraw, shown, svg } from "./dom.js";

/** @typedef {import("./dom.js").Style} Style */
/** @typedef {{rounds: number[], bytes?: (number|null)[], seconds?: (number|null)[], virtual?: (number|null)[]}} Axes */
/** @typedef {{label: string, x: Axes, mean: (number|null)[], low: (number|null)[], high: (number|null)[], count: number, seeds: {x: Axes, mean: (number|null)[]}[]}} Line */
/** @typedef {"rounds" | "bytes" | "seconds" | "virtual"} AxisName */
/** @typedef {{low: number, high: number}} Range */

/** @type {Record<AxisName, string>} */
export const AXES = { rounds: "Rounds", bytes: "Bytes sent and received", seconds: "Seconds of computing", virtual: "Virtual time" };

/** @param {number} value @param {{percent: boolean} | undefined} metric */
export const onTick = (value, metric) => (metric?.percent ? `${Number((100 * value).toPrecision(4))} %` : brief(value));

/** @param {number} value @param {AxisName} axis */
const onAxis = (value, axis) => (axis === "rounds" ? String(Math.round(value)) : axis === "bytes" ? bytes(value) : duration(value));

/** @param {{x: Axes}} line @param {AxisName} axis @returns {(number|null)[]} */
export const places = (line, axis) => line.x[axis] ?? line.x.rounds;

/**
 * The range of all lines on both axes.
 * @param {Line[]} lines @param {AxisName} axis @returns {{x: Range, y: Range}}
 */
export function ranges(lines, axis) {
  /** @param {(number|null)[][]} rows @returns {Range} */
  const around = (rows) => {
    const found = { low: Infinity, high: -Infinity };
    for (const row of rows) for (const one of row) if (one !== null) { found.low = Math.min(found.low, one); found.high = Math.max(found.high, one); }
    return found;
  };
  const x = around(lines.flatMap((line) => [line, ...line.seeds]).map((line) => places(line, axis)));
  if (x.high === x.low) { x.low -= 0.5; x.high += 0.5; }
  const means = around(lines.flatMap((line) => [line.mean, ...line.seeds.map((one) => one.mean)]));
  const bands = around(lines.flatMap((line) => [line.mean, line.low, line.high]));
  const widths = lines.flatMap((line) => line.high.map((one, place) => Number(one) - Number(line.mean[place]))).sort((a, b) => a - b);
  // a few very wide intervals, as of two seeds, must not press the lines flat
  const most = Math.max((means.high - means.low) / 2, widths[Math.floor(widths.length / 2)] ?? 0);
  const room = (means.high - means.low || Math.abs(means.high) || 1) * 0.04;
  return { x, y: { low: Math.min(means.low, Math.max(bands.low, means.low - most)) - room, high: Math.max(means.high, Math.min(bands.high, means.high + most)) + room } };
}

/** @param {Range} range @param {number} most @param {boolean} [whole] @returns {number[]} */
export function ticks(range, most, whole = false) {
  const span = range.high - range.low;
  if (!(span > 0)) return [range.low];
  let step = 10 ** Math.floor(Math.log10(span / most));
  for (const factor of [1, 2, 5, 10]) if (span / (step * factor) <= most) { step *= factor; break; }
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(range.low / step) * step; at <= range.high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/**
 * Draw lines into an element.
 * @param {HTMLElement} into
 * @param {{lines: Line[], styles: Map<string, Style>, axis: AxisName, metric: import("./dom.js").Metric | undefined, title: string, bands: boolean, hidden: Set<string>, range?: {x: Range, y: Range}, toggle: (label: string) => void}} what
 */
export function drawLines(into, what) {
  const { axis, metric, styles } = what;
  const lines = what.lines.filter((line) => !what.hidden.has(line.label));
  const width = Math.max(into.clientWidth, 280);
  const height = Math.round(Math.min(Math.max(width * 0.45, 260), 450));
  const [left, right, top, bottom] = [58, 14, 10, 42];
  const range = what.range ?? ranges(lines, axis);
  const means = lines.flatMap((line) => line.mean.filter((one) => one !== null)).map(Number);
  const log = !metric?.share && means.length > 0 && Math.min(...means) > 0 && Math.max(...means) > 50 * Math.min(...means);
  const yRange = log ? { low: Math.log10(Math.min(...means) / 1.6), high: Math.log10(Math.max(...means) * 1.6) } : range.y;
  /** @param {number} value */
  const x = (value) => left + ((value - range.x.low) / (range.x.high - range.x.low)) * (width - left - right);
  /** @param {number} value */
  const y = (value) => {
    const at = log ? Math.log10(Math.max(value, 1e-300)) : value;
    return top + (1 - Math.min(Math.max((at - yRange.low) / (yRange.high - yRange.low), 0), 1)) * (height - top - bottom);
  };
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `${what.title}. Left and right arrows read the values.` });
  if (lines.length && Number.isFinite(yRange.low)) {
    const yTicks = log ? ticks(yRange, 6, true).map((power) => 10 ** power) : ticks(yRange, 6);
    for (const at of yTicks) {
      drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }), svg("text", { x: left - 7, y: y(at) + 4, "text-anchor": "end" }, onTick(at, metric)));
    }
    for (const at of ticks(range.x, Math.max(3, Math.min(9, width / 110)), axis === "rounds")) {
      drawing.append(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: height - bottom, y2: height - bottom + 5 }), svg("text", { x: x(at), y: height - bottom + 19, "text-anchor": "middle" }, onAxis(at, axis)));
    }
    drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }), svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, AXES[axis]));
    /** @param {(number|null)[]} xs @param {(number|null)[]} ys */
    const path = (xs, ys) => ys.map((one, place) => (one === null || xs[place] === null ? "" : `${x(Number(xs[place])).toFixed(1)},${y(one).toFixed(1)}`)).filter(Boolean);
    for (const line of lines) {
      const style = /** @type {Style} */ (styles.get(line.label));
      const stroke = colour(style);
      if (what.bands && line.mean.length > 1) {
        const edge = [...path(places(line, axis), line.high), ...path(places(line, axis), line.low).reverse()];
        drawing.append(svg("polygon", { points: edge.join(" "), fill: stroke, "fill-opacity": lines.length > 4 ? 0.06 : 0.18 }));
      }
      for (const seed of line.seeds) drawing.append(svg("polyline", { points: path(places(seed, axis), seed.mean).join(" "), fill: "none", stroke, "stroke-width": 0.9, "stroke-opacity": 0.55 }));
      const points = path(places(line, axis), line.mean);
      drawing.append(svg("polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": style.dashes.join(" ") || null, "stroke-linejoin": "round" }));
      if (points.length <= 10) for (const point of points) { const [cx, cy] = point.split(","); drawing.append(svg("circle", { cx, cy, r: 2.8, fill: stroke })); }
    }
  }
  const here = svg("line", { class: "here", y1: top, y2: height - bottom, visibility: "hidden" });
  drawing.append(here);
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const rounds = [...new Set(lines.flatMap((line) => line.x.rounds))].sort((a, b) => a - b);
  const before = into.dataset.read; // the round that was read out before this drawing replaced the one before
  let place = rounds.length;
  /** @param {number} wanted */
  const read = (wanted) => {
    place = Math.min(Math.max(wanted, 0), rounds.length - 1);
    const round = rounds[place];
    into.dataset.read = String(round);
    const found = lines.map((line) => ({ line, at: line.x.rounds.indexOf(round) })).filter((one) => one.at >= 0 && one.line.mean[one.at] !== null);
    if (!found.length) return;
    found.sort((a, b) => (metric?.up === false ? 1 : -1) * (Number(a.line.mean[a.at]) - Number(b.line.mean[b.at])));
    const across = x(Number(places(found[0].line, axis)[found[0].at]));
    here.setAttribute("x1", String(across));
    here.setAttribute("x2", String(across));
    here.setAttribute("visibility", "visible");
    const rows = found.slice(0, 12).map(({ line, at }) => {
      const [low, high] = [line.low[at], line.high[at]];
      const band = low !== null && high !== null && high > low ? ` (${shown(low, metric)} to ${shown(high, metric)})` : "";
      const mark = el("span", { class: "swatch" });
      mark.style.background = colour(/** @type {Style} */ (styles.get(line.label)));
      return el("div", {}, mark, `${line.label}: ${shown(line.mean[at], metric)}${band}`);
    });
    const where = axis === "rounds" ? "" : `, ${onAxis(Number(places(found[0].line, axis)[found[0].at]), axis)}`;
    tip.replaceChildren(el("div", {}, el("b", {}, `Round ${round}${where}`)), ...rows);
    tip.hidden = false;
    const scale = into.clientWidth / width || 1;
    tip.style.left = across > width / 2 ? "auto" : `${across * scale + 12}px`;
    tip.style.right = across > width / 2 ? `${(width - across) * scale + 12}px` : "auto";
    tip.style.top = `${top + 4}px`;
  };
  const hide = () => { tip.hidden = true; delete into.dataset.read; here.setAttribute("visibility", "hidden"); };
  drawing.addEventListener("pointermove", (/** @type {any} */ event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    let [best, near] = [0, Infinity];
    const first = lines.reduce((a, b) => (b.x.rounds.length > (a?.x.rounds.length ?? 0) ? b : a), lines[0]);
    if (!first) return;
    places(first, axis).forEach((one, number) => {
      const far = Math.abs(x(Number(one)) - at);
      if (one !== null && far < near) [best, near] = [first.x.rounds[number], far];
    });
    read(rounds.indexOf(best));
  });
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("keydown", (/** @type {any} */ event) => {
    /** @type {Record<string, number>} */
    const steps = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: rounds.length - 1 };
    if (event.key in steps) { event.preventDefault(); read(steps[event.key]); }
    if (event.key === "Escape") hide();
  });
  const legend = el("ul", { class: "legend", "aria-label": "Lines" }, ...what.lines.map((line) => {
    const style = /** @type {Style} */ (styles.get(line.label));
    const sample = svg("svg", { width: 30, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 30, y1: 5, y2: 5, stroke: colour(style), "stroke-width": 2.4, "stroke-dasharray": style.dashes.join(" ") || null }));
    return el("li", {}, el("button", { type: "button", "aria-pressed": String(!what.hidden.has(line.label)), onclick: () => what.toggle(line.label) }, sample, line.label));
  }));
  redraw(into, () => into.replaceChildren(legend, el("div", { class: "chart" }, drawing, tip)));
  if (before !== undefined && rounds.includes(Number(before))) read(rounds.indexOf(Number(before)));
}
