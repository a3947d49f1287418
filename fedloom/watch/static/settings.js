// What is run, where, and what a careful reader should know: the report's cautions.

import { el, read } from "./dom.js";

/** @typedef {import("./page.js").Context} Context */

/** @param {string[]} cautions */
export function warnings(cautions) {
  return el("div", { class: "warnings" }, el("b", {}, cautions.length ? "Before you trust these numbers" : "No cautions"), el("ul", {}, ...cautions.map((one) => el("li", {}, one))));
}

/** @param {Context} context @returns {Promise<any[]>} */
export const reads = ({ overviews }) => Promise.all(overviews.map((_, number) => read(`runs/${number}/settings`)));

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const grid = el("div", { class: "runs" });
  const boxes = context.overviews.map(() => el("div"));
  grid.append(...boxes);
  into.replaceChildren(grid);
  return async () => {
    const all = await reads(context);
    boxes.forEach((box, number) => {
      const found = all[number];
      const run = context.overviews[number];
      const facts = Object.entries({ ...found.machine, ...found.data });
      const cells = run.cells.map((cell) => el("tr", {}, el("th", { class: "text", scope: "row" }, cell.label), el("td", {}, cell.seed), el("td", { class: "text" }, cell.status), el("td", {}, `${cell.rounds_done}${run.rounds ? ` of ${run.rounds}` : ""}`), el("td", { class: "text" }, cell.error ?? "")));
      box.replaceChildren(
        el("h2", {}, run.name), warnings(found.cautions),
        el("h3", {}, "Cells"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...["algorithm", "seed", "status", "rounds", "error"].map((words, place) => el("th", { class: [0, 2, 4].includes(place) ? "text" : "", scope: "col" }, words)))), el("tbody", {}, ...cells))),
        el("h3", {}, "Experiment"), el("pre", { tabindex: 0 }, found.experiment),
        el("h3", {}, "Machine and data"), el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      );
    });
  };
}
