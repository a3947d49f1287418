// The models as pictures of their weights, with what each client holds: something to point at.

import { cellChoices, cellQuery } from "./clients.js";
import { clientName, el, read, shown, svg } from "./dom.js";

/** @typedef {import("./page.js").Context} Context */
/** @typedef {{shape: [number, number, number], values: number[]}} Picture */

/** Orange for negative weights, blue for positive ones. @param {Picture} picture @param {string} words */
function drawn(picture, words) {
  const [tiles, rows, columns] = picture.shape;
  const across = Math.ceil(Math.sqrt(tiles));
  const down = Math.ceil(tiles / across);
  const gap = tiles > 1 ? 1 : 0;
  const canvas = el("canvas", { width: across * (columns + gap) - gap, height: down * (rows + gap) - gap, role: "img", "aria-label": words, class: "weights" });
  const drawing = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = drawing.createImageData(canvas.width, canvas.height);
  picture.values.forEach((value, place) => {
    const tile = Math.floor(place / (rows * columns));
    const row = Math.floor((place % (rows * columns)) / columns);
    const at = 4 * ((Math.floor(tile / across) * (rows + gap) + row) * canvas.width + (tile % across) * (columns + gap) + (place % columns));
    const part = Math.abs(value) / 127;
    const full = value < 0 ? [213, 94, 0] : [0, 114, 178];
    full.forEach((one, channel) => { image.data[at + channel] = Math.round(245 + (one - 245) * part); });
    image.data[at + 3] = 255;
  });
  drawing.putImageData(image, 0, 0);
  return canvas;
}

/** @param {number[]} counts @param {string[]} classes @param {string} name */
function holdings(counts, classes, name) {
  const most = Math.max(...counts, 1);
  const words = `${name} holds ${counts.map((count, place) => `${count} of ${classes[place] ?? place}`).join(", ")}`;
  return svg("svg", { viewBox: `0 0 ${10 * counts.length} 40`, role: "img", "aria-label": words, class: "holds" }, svg("title", {}, words), ...counts.flatMap((count, place) => [
    svg("rect", { x: 10 * place + 1, width: 8, y: 28 - (26 * count) / most, height: (26 * count) / most, fill: "#0072B2" }),
    ...(counts.length <= 12 ? [svg("text", { x: 10 * place + 5, y: 38, "text-anchor": "middle" }, (classes[place] ?? String(place)).slice(0, 2))] : [])]));
}

/** @param {Context} context @returns {Promise<any>} */
export const reads = (context) => read(`runs/${context.state.run}/models`, cellQuery(context));

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const { state } = context;
  const note = el("p", { class: "note" });
  const cards = el("div", { class: "people" });
  const choices = cellChoices(context);
  into.replaceChildren(el("div", { class: "bar" }, ...choices), note, cards);

  async function update() {
    const found = await reads(context);
    const metric = context.metrics().find((one) => one.name === state.metric);
    choices[choices.length - 1].hidden = found.final; // what was measured before the end is no choice any more
    const pictured = Object.keys(found.shared).length > 0 || found.clients.some((/** @type {any} */ one) => one.picture);
    note.textContent = `${found.round === null ? "There is no checkpoint with a model yet. " : pictured ? `Weights of the first layer after round ${found.round}: blue is positive, orange negative, pale is near zero. ` : `The checkpoint of round ${found.round} holds no model here: clients keep theirs. `}${found.classes.length ? "Bars: the labels that a client holds." : ""}${found.measured ? ` ${found.measured}` : ""}${found.all > found.clients.length ? ` The first ${found.clients.length} of ${found.all} clients are shown.` : ""}`;
    cards.replaceChildren(
      ...Object.entries(found.shared).map(([name, picture]) => el("figure", { class: "shared" }, el("figcaption", {}, el("b", {}, name)), picture ? drawn(picture, `The weights of ${name}`) : null)),
      ...found.clients.map((/** @type {any} */ one, /** @type {number} */ number) => {
        const name = clientName(one.name, number);
        return el("figure", { tabindex: 0 }, el("figcaption", {}, el("b", {}, name), ` ${one.value === null ? "not measured" : `${state.metric} ${shown(one.value, metric)}`}${one.distance === null ? "" : `, ${shown(one.distance, { percent: true })} from the mean model`}`), one.holds ? holdings(one.holds, found.classes, name) : null, one.picture ? drawn(one.picture, `The weights of ${name}`) : null);
      }));
  }
  return update;
}
