// Elements, numbers in words, and requests. Text always becomes a text node: nothing that a run holds is read as HTML.

/** @typedef {string | number | Node | null | undefined} Child */
/** @typedef {{label: string, colour: string, dark: string, dashes: number[], pooled?: boolean}} Style */
/** @typedef {{name: string, percent: boolean, share: boolean, up: boolean}} Metric */

/**
 * Make an element. Attributes that begin with "on" are listeners.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  fill(made, attributes, children);
  return made;
}

/**
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Child} children
 */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(made, attributes, children);
  return made;
}

/** @param {Element} made @param {Record<string, any>} attributes @param {Child[]} children */
function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
}

/** @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`there is no element ${id}`);
  return found;
}

/**
 * A labelled choice that keeps its value when the page is drawn again.
 * @param {string} words @param {[string, string][]} options @param {string} value @param {(value: string) => void} choose
 */
export function choice(words, options, value, choose) {
  const made = el("select", { autocomplete: "off", onchange: () => choose(made.value) }, ...options.map(([key, name]) => el("option", { value: key, selected: key === value }, name)));
  return el("label", {}, words, made);
}

/** @param {string} words @param {boolean} on @param {(on: boolean) => void} choose */
export function tick(words, on, choose) {
  const made = el("input", { type: "checkbox", checked: on, onchange: () => choose(made.checked) });
  return el("label", { class: "tick" }, made, words);
}

/** An error that the server explained. */
export class Refused extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The server did not answer. */
export class Away extends Error {}

/** @param {string} where @param {RequestInit} [how] */
async function ask(where, how) {
  const reply = await fetch(where, how).catch((error) => { throw new Away(String(error)); });
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text;
  try {
    const detail = JSON.parse(text).detail;
    message = typeof detail === "string" ? detail : text;
  } catch { /* it is plain text */ }
  throw new Refused(reply.status, message);
}

/** @param {string} path @param {Record<string, string | number | boolean>} [query] */
function address(path, query = {}) {
  const words = new URLSearchParams(Object.entries(query).map(([key, value]) => [key, String(value)])).toString();
  return `api/${path}${words ? `?${words}` : ""}`;
}

/** @param {string} path @param {Record<string, string | number | boolean>} [query] @returns {Promise<any>} */
export async function get(path, query) {
  return (await ask(address(path, query))).json();
}

export const MOST = 40; // answers that are kept
/** @type {Map<string, Promise<any>>} */
const kept = new Map();
let changes = 0;

/** Forget the answers that `read` keeps: a run has changed. */
export const forget = () => { kept.clear(); changes += 1; };

/** How often a run has changed since the page was opened: what is as old as that is up to date. */
export const age = () => changes;

/**
 * Ask what a view shows, as bytes or else as JSON. Until a run changes, the answer stays the same and is not asked for again.
 * @param {string} path @param {Record<string, string | number | boolean>} [query] @param {boolean} [asBytes] @returns {Promise<any>}
 */
export function read(path, query, asBytes = false) {
  const where = address(path, query);
  const found = kept.get(where) ?? ask(where).then((reply) => (asBytes ? reply.arrayBuffer() : reply.json()));
  kept.set(where, found);
  found.catch(() => kept.delete(where));
  if (kept.size > MOST) kept.delete(/** @type {string} */ (kept.keys().next().value));
  return found;
}

/** @param {string} path @param {unknown} body @returns {Promise<any>} */
export async function post(path, body) {
  const reply = await ask(address(path), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  return reply.json();
}

/**
 * Draw an element's content again and put the focus back where it was.
 * @param {HTMLElement} into @param {() => void} draw
 */
export function redraw(into, draw) {
  const path = [];
  for (let at = document.activeElement; at && at !== into; at = at.parentElement) path.unshift(at.parentElement ? [...at.parentElement.children].indexOf(at) : 0);
  const inside = into !== document.activeElement && into.contains(document.activeElement);
  draw();
  if (!inside) return;
  /** @type {Element | undefined} */
  let found = into;
  for (const place of path) found = found?.children[place];
  if (found instanceof HTMLElement || found instanceof SVGElement) found.focus({ preventScroll: true });
}

const dark = matchMedia("(prefers-color-scheme: dark)");

/** @param {Style} style */
export const colour = (style) => (dark.matches ? style.dark : style.colour);
/** @param {() => void} draw */
export const onTheme = (draw) => dark.addEventListener("change", draw);

/** @param {number | null | undefined} value @param {{percent: boolean} | undefined} metric */
export function shown(value, metric) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return metric?.percent ? `${(100 * value).toFixed(1)} %` : brief(value);
}

/** @param {string | undefined} name @param {number} number */
export const clientName = (name, number) => (name === undefined || /^\d+$/.test(name) ? `client ${name ?? number}` : name);

/** @param {number} value */
export const brief = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4))));

/** @param {number} value */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : Number(value.toPrecision(3))} ${units[unit]}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Number((seconds / 3600).toPrecision(2))} h`;
  return `${Number((seconds / 86400).toPrecision(2))} days`;
}

/** @param {string | null} moment @param {boolean} [brief] without year and seconds */
export const clock = (moment, brief = false) => (moment ? new Date(moment).toLocaleString(undefined, brief ? { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" } : {}) : "–");
