// Clients × rounds: who took part, whose answer did not count and why, and how each client fared; a pixel or more for each pair.

import { cellChoices, cellQuery, ordered, reads as readClients } from "./clients.js";
import { choice, clientName, el, read, shown } from "./dom.js";

/** @typedef {import("./page.js").Context} Context */

// of the states, after "nothing": took part, left out, outlier, late, gone, surplus, refused, failed, revoked
const IN_THE_LIGHT = ["#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#77808c", "#56B4E9", "#882255", "#c62828", "#332288"];
const IN_THE_DARK = ["#2b8fd0", "#D55E00", "#CC79A7", "#E69F00", "#97a1ad", "#56B4E9", "#F0E442", "#e05252", "#9d8cff"];
// of values, from the least to the most: matplotlib's cividis, as in the report
const SHADES = "00224e 00285b 002e6a 053371 1c396f 293f6e 33446d 3c4a6c 45506c 4d556c 555b6d 5c616e 646770 6b6d72 727274 787877 807f78 888578 908b78 979177 a09875 a89e73 b0a571 b9ab6d c2b369 cbb965 d3c05f dcc859 e6d051 efd748 f8df3c fee838".split(" ");
const NAMED = 30; // rows, at most, that are high enough for a name
const DARK = matchMedia("(prefers-color-scheme: dark)");

/** @param {string} hex @returns {[number, number, number]} */
const rgb = (hex) => [parseInt(hex.slice(1, 3), 16), parseInt(hex.slice(3, 5), 16), parseInt(hex.slice(5, 7), 16)];

/** @type {{first: number, rounds: number, clients: number, values: Float32Array, states: Uint8Array, key: string} | null} */
let data = null; // also while another view is open: then only later rounds are read

/**
 * Bring the pairs of the chosen cell up to date, and return the table of its clients.
 * @param {Context} context @returns {Promise<any>}
 */
export async function reads(context) {
  const { state } = context;
  const key = JSON.stringify([state.run, cellQuery(context, false)]);
  const known = data && data.key === key ? data : null;
  const after = known ? known.first + known.rounds - 1 : 0;
  const [table, buffer] = await Promise.all([readClients(context, false), read(`runs/${state.run}/matrix`, { ...cellQuery(context, false), after }, true)]);
  const [first, rounds, clients] = new Uint32Array(buffer, 0, 3);
  const values = new Float32Array(buffer, 24, rounds * clients);
  const states = new Uint8Array(buffer, 24 + 4 * rounds * clients, rounds * clients);
  if (!known) {
    data = { first, rounds, clients, values, states, key };
  } else if (known.clients === clients && first === after + 1) {
    if (rounds && data === known) data = { ...known, rounds: known.rounds + rounds, values: joined(known.values, values), states: joined(known.states, states) };
  } else { // clients joined, or rounds were taken back: read everything again
    data = null;
    return reads(context);
  }
  return table;
}

/** @template {Float32Array | Uint8Array} T @param {T} one @param {T} more @returns {T} */
function joined(one, more) {
  const both = new /** @type {any} */ (one.constructor)(one.length + more.length);
  both.set(one);
  both.set(more, one.length);
  return both;
}

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const { state } = context;
  /** @type {any} */
  let table = null;
  let [row, column] = [0, 0];
  /** @type {[string, string][]} */
  const orders = [["number", "as numbered"], ["name", "name"], ["value", "last value"], ["took_part", "rounds taken part"], ["not_counted", "answers not counted"]];
  const filter = el("input", { type: "search", autocomplete: "off", value: state.filter, placeholder: "part of a name", oninput: () => { state.filter = filter.value; context.remember(); paint(); } });
  const bar = el("div", { class: "bar" }, ...cellChoices(context, false), choice("Colour", [["value", "value"], ["state", "who took part"]], state.paint, (value) => { state.paint = value; context.remember(); paint(); }), choice("Order", orders, orders.some(([key]) => key === state.sort) ? state.sort : "number", (value) => { state.sort = value; state.down = value !== "name" && value !== "number"; context.remember(); paint(); }), el("label", {}, "Filter", filter));
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Clients by rounds. Arrow keys move from pair to pair and read them." });
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const [names, axis] = [el("div", { class: "names", "aria-hidden": "true" }), el("div", { class: "axis", "aria-hidden": "true" })];
  const key = el("div", { class: "swatches" });
  const note = el("p", { class: "note" });
  into.replaceChildren(bar, note, el("div", { class: "matrix" }, names, el("div", { class: "chart" }, canvas, tip), axis), key);
  /** @type {number[]} */
  let numbers = [];

  function paint() {
    if (!data || !table) return;
    const began = performance.now();
    numbers = ordered(table, state);
    const { rounds, clients, values, states } = data;
    const metric = context.metrics().find((one) => one.name === state.metric);
    let [low, high] = [Infinity, -Infinity];
    if (metric?.share) [low, high] = [0, 1];
    else for (const one of values) { if (one < low) low = one; if (one > high) high = one; }
    /** @type {[number, number, number][]} */
    const shades = SHADES.map((one) => rgb(`#${one}`));
    if (metric?.up === false) shades.reverse();
    const empty = rgb(DARK.matches ? "#242d37" : "#e8ecf0");
    const colours = DARK.matches ? IN_THE_DARK : IN_THE_LIGHT;
    const marks = colours.map(rgb);
    const [wide, tall] = [Math.max(rounds, 1), Math.max(numbers.length, 1)];
    const image = new ImageData(wide, tall);
    const words = new Uint32Array(image.data.buffer);
    /** @param {[number, number, number]} one */
    const word = (one) => (255 << 24) | (one[2] << 16) | (one[1] << 8) | one[0];
    const [none, shadeWords, markWords] = [word(empty), shades.map(word), marks.map(word)];
    const byState = state.paint === "state";
    const scale = (shades.length - 1) / (high - low || 1);
    for (let y = 0; y < numbers.length; y += 1) {
      const client = numbers[y];
      for (let x = 0; x < rounds; x += 1) {
        const at = x * clients + client;
        const what = states[at];
        const value = values[at];
        words[y * wide + x] = byState ? (what ? markWords[what - 1] : none) : what > 1 ? markWords[what - 1] : value === value ? shadeWords[Math.round((value - low) * scale)] : none;
      }
    }
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const height = Math.min(Math.max(tall * 22, 60), 660);
    names.replaceChildren(...(tall <= NAMED ? numbers.map((client) => el("span", {}, clientName(table.names[client], client))) : []));
    axis.replaceChildren(...(rounds ? [el("span", {}, data.first), el("span", {}, "Rounds"), el("span", {}, data.first + rounds - 1)] : []));
    const width = Math.max(canvas.clientWidth, 200);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const small = new OffscreenCanvas(wide, tall);
    /** @type {OffscreenCanvasRenderingContext2D} */ (small.getContext("2d")).putImageData(image, 0, 0);
    const drawing = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    drawing.imageSmoothingEnabled = tall * 1.0 > canvas.height || wide > canvas.width; // otherwise rows would vanish
    drawing.drawImage(small, 0, 0, canvas.width, canvas.height);
    note.textContent = rounds ? `${numbers.length} clients from top to bottom, rounds ${data.first} to ${data.first + rounds - 1} from left to right.${data.first > 1 ? " Earlier rounds are left out: there are too many pairs." : ""}` : "No round has finished yet.";
    const found = new Set(states);
    /** @type {{name: string, colour: string, shown: boolean}[]} */
    const legend = context.about.marks.map((/** @type {string} */ name, /** @type {number} */ place) => ({ name, colour: colours[place], shown: found.has(place + 1) && (byState || place > 0) }));
    const swatch = (/** @type {string} */ name, /** @type {string} */ hex) => { const mark = el("i", { class: "swatch" }); mark.style.background = hex; return el("span", {}, mark, name); };
    const ramp = el("span", { class: "ramp", "aria-hidden": "true" }, ...shades.map((one) => { const step = el("i"); step.style.background = `rgb(${one.join(",")})`; return step; }));
    key.replaceChildren(...(byState ? [] : [el("span", {}, `${shown(low, metric)}`, ramp, `${shown(high, metric)}`)]), ...legend.filter((one) => one.shown).map((one) => swatch(one.name, one.colour)), swatch(byState ? "did not take part" : "not measured", DARK.matches ? "#242d37" : "#e8ecf0"));
    canvas.dataset.milliseconds = (performance.now() - began).toFixed(1);
  }

  function tell() {
    if (!data || !numbers.length || !data.rounds) return;
    row = Math.min(Math.max(row, 0), numbers.length - 1);
    column = Math.min(Math.max(column, 0), data.rounds - 1);
    const client = numbers[row];
    const at = column * data.clients + client;
    const metric = context.metrics().find((one) => one.name === state.metric);
    const what = data.states[at] ? context.about.marks[data.states[at] - 1] : "did not take part";
    const value = Number.isNaN(data.values[at]) ? "not measured" : `${state.metric} ${shown(data.values[at], metric)}`;
    tip.replaceChildren(el("div", {}, el("b", {}, clientName(table.names[client], client))), el("div", {}, `Round ${data.first + column}: ${what}, ${value}`));
    tip.hidden = false;
    const [x, y] = [((column + 0.5) / data.rounds) * canvas.clientWidth, ((row + 0.5) / numbers.length) * canvas.clientHeight];
    tip.style.left = x > canvas.clientWidth / 2 ? "auto" : `${x + 14}px`;
    tip.style.right = x > canvas.clientWidth / 2 ? `${canvas.clientWidth - x + 14}px` : "auto";
    tip.style.top = `${Math.max(y - 46, 0)}px`;
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!data) return;
    const box = canvas.getBoundingClientRect();
    column = Math.floor(((event.clientX - box.left) / box.width) * data.rounds);
    row = Math.floor(((event.clientY - box.top) / box.height) * numbers.length);
    tell();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("blur", () => { tip.hidden = true; });
  canvas.addEventListener("click", () => { if (data && numbers.length) { state.client = numbers[row]; state.round = data.first + column; context.remember(); } });
  canvas.addEventListener("keydown", (event) => {
    /** @type {Record<string, [number, number]>} */
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-20, 0], PageDown: [20, 0], Home: [0, -1e9], End: [0, 1e9] };
    const step = steps[event.key];
    if (step) { event.preventDefault(); row += step[0]; column += step[1]; tell(); }
    if (event.key === "Escape") tip.hidden = true;
  });

  async function update() {
    table = await reads(context);
    paint();
    if (!tip.hidden) tell();
  }
  return update;
}
