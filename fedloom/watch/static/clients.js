// The table of clients: sorted by any column, filtered by name, a page at a time, so that thousands of them are as quick as ten.

import { bytes, choice, el, read, redraw, shown } from "./dom.js";

/** @typedef {import("./page.js").Context} Context */

const ROWS = 50;
/** @type {[string, string][]} */
const COLUMNS = [["name", "client"], ["value", ""], ["measured", "measured in round"], ["took_part", "rounds taken part"], ["last_round", "last taken part"], ["not_counted", "answers not counted"], ["bytes_up", "sent"], ["bytes_down", "received"], ["train", "train"], ["validation", "validation"], ["test", "test"]];

/** What is measured in rounds: the final model is not. @param {Context} context @returns {[string, string][]} */
const inRounds = ({ panels }) => Object.entries(panels()).filter(([key]) => key !== "server");

/** The phase of a view, which may show the final model or only rounds. @param {Context} context @param {boolean} [final] */
export const phaseOf = (context, final = true) => (context.state.phase === "final" && !final ? inRounds(context)[0]?.[0] ?? "" : context.state.phase);

/** What a view of one cell asks for. @param {Context} context @param {boolean} [final] */
export const cellQuery = (context, final = true) => ({ label: context.state.label, seed: context.state.seed, metric: context.state.metric, phase: phaseOf(context, final) });

/** @param {Context} context @param {boolean} [final] @returns {Promise<any>} */
export const reads = (context, final = true) => read(`runs/${context.state.run}/clients`, cellQuery(context, final));

/** @param {Context} context @param {boolean} [final] whether the final model can be chosen @returns {HTMLElement[]} */
export function cellChoices(context, final = true) {
  const { redo, state } = context;
  const run = context.run();
  /** @type {[string, string][]} */
  const first = final ? [["final", "Final model, once it is measured"]] : [];
  return [
    ...context.runChoice(),
    choice("Algorithm", run.labels.map((one) => [one.label, one.label]), state.label, (value) => { state.label = value; redo(); }),
    choice("Seed", run.seeds.map((one) => [String(one), String(one)]), String(state.seed), (value) => { state.seed = Number(value); redo(); }),
    choice("Metric", context.metrics().map((one) => [one.name, one.name]), state.metric, (value) => { state.metric = value; redo(); }),
    choice("Measured", [...first, ...inRounds(context)], phaseOf(context, final), (value) => { state.phase = value; redo(); }),
  ];
}

/**
 * The numbers of the clients that match the filter, in the chosen order.
 * @param {{names: string[], columns: Record<string, (number|null)[]>}} table @param {Context["state"]} state @returns {number[]}
 */
export function ordered(table, state) {
  const wanted = state.filter.toLocaleLowerCase();
  const numbers = table.names.map((_, number) => number).filter((number) => table.names[number].toLocaleLowerCase().includes(wanted));
  if (state.sort === "number") return numbers;
  const sign = state.down ? -1 : 1;
  const { names, columns } = table;
  if (state.sort === "name") {
    const collator = new Intl.Collator(undefined, { numeric: true });
    return numbers.sort((a, b) => sign * collator.compare(names[a], names[b]) || a - b);
  }
  const column = columns[state.sort];
  return numbers.sort((a, b) => {
    const [x, y] = [column[a], column[b]];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a - b; // nothing measured comes last
    return sign * (x - y) || a - b;
  });
}

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const { state } = context;
  let page = 0;
  /** @type {any} */
  let table = null;
  const filter = el("input", { type: "search", autocomplete: "off", value: state.filter, placeholder: "part of a name", oninput: () => { state.filter = filter.value; page = 0; context.remember(); show(); } });
  const count = el("p", { class: "note", role: "status" });
  const scroll = el("div", { class: "scroll" });
  const pages = el("div", { class: "bar" });
  into.replaceChildren(el("div", { class: "bar" }, ...cellChoices(context), el("label", {}, "Filter", filter)), count, scroll, pages);

  function show() {
    if (!table) return;
    const began = performance.now();
    const metric = context.metrics().find((one) => one.name === state.metric);
    const numbers = ordered(table, state);
    const last = Math.max(Math.ceil(numbers.length / ROWS) - 1, 0);
    page = Math.min(page, last);
    /** @param {string} key @param {number} client */
    const text = (key, client) => {
      const value = table.columns[key][client];
      if (value === null) return "–";
      return key === "value" ? shown(value, metric) : key.startsWith("bytes") ? bytes(value) : (key === "measured" || key === "last_round") && !value ? "–" : String(value);
    };
    const head = COLUMNS.map(([key, words]) => {
      const sorted = state.sort === key ? (state.down ? "descending" : "ascending") : null;
      const click = () => { state.down = state.sort === key ? !state.down : key !== "name"; state.sort = key; page = 0; context.remember(); show(); };
      return el("th", { class: key === "name" ? "text sorts" : "sorts", scope: "col", "aria-sort": sorted }, el("button", { type: "button", onclick: click }, key === "value" ? state.metric : words));
    });
    const body = numbers.slice(page * ROWS, (page + 1) * ROWS).map((client) => el("tr", { class: client === state.client ? "chosen" : null }, el("th", { class: "text", scope: "row" }, table.names[client]), ...COLUMNS.slice(1).map(([key]) => el("td", {}, text(key, client)))));
    redraw(scroll, () => scroll.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))));
    const from = numbers.length ? page * ROWS + 1 : 0;
    const pooled = context.run().labels.some((one) => one.label === state.label && one.pooled);
    const leaves = pooled ? ` ${state.label} trains on all data in one place: every example leaves its client.` : "";
    count.textContent = `${numbers.length} of ${table.names.length} clients; rows ${from} to ${Math.min((page + 1) * ROWS, numbers.length)}.${table.about ? ` ${table.about}` : ""}${leaves}`;
    /** @param {string} words @param {number} to */
    const button = (words, to) => el("button", { type: "button", disabled: to < 0 || to > last || to === page, onclick: () => { page = to; show(); } }, words);
    redraw(pages, () => pages.replaceChildren(...(last ? [button("First", 0), button("Previous", page - 1), button("Next", page + 1), button("Last", last)] : [])));
    scroll.dataset.milliseconds = (performance.now() - began).toFixed(1);
  }

  async function update() {
    table = await reads(context);
    show();
  }
  return update;
}
