// The page: which view is open, what it shows, and when it changes.

import * as clients from "./clients.js";
import * as curves from "./curves.js";
import * as distribution from "./distribution.js";
import * as federation from "./federation.js";
import * as matrix from "./matrix.js";
import * as models from "./models.js";
import * as settings from "./settings.js";
import { Away, byId, bytes, choice, clock, duration, el, forget, get, onTheme, post, redraw, Refused } from "./dom.js";

/** @typedef {{label: string, seed: number, status: string, rounds_done: number, error: string | null, started: string | null, finished: string | null}} Cell */
/** @typedef {{wish: string, time: string, running: boolean, paused: number | null}} Control */
/** @typedef {{name: string, folder: string, status: string, rounds: number | null, cells: Cell[], labels: import("./dom.js").Style[], seeds: number[], metrics: import("./dom.js").Metric[], panels: Record<string, string>, clients: number, started: string | null, finished: string | null, seconds_left: number | null, seconds: number, bytes_up: number, bytes_down: number, epsilon: {label: string, seed: number, spent: number, word: string, about: string, budget: number | null}[], control: Control, network: boolean}} Overview */
/** @typedef {{run: number, view: string, metric: string, panel: string, phase: string, label: string, seed: number, axis: import("./chart.js").AxisName, round: number | null, client: number | null, hidden: Set<string>, eachSeed: boolean, bands: boolean, sort: string, down: boolean, filter: string, paint: string}} State */
/** @typedef {{state: State, about: any, overviews: Overview[], run: () => Overview, metrics: () => import("./dom.js").Metric[], panels: () => Record<string, string>, runChoice: () => HTMLElement[], remember: () => void, redo: () => void, refresh: () => Promise<void>, ask: (words: string, button: string) => Promise<boolean>, fail: (error: unknown) => void}} Context */
/** @typedef {{title: string, reads: (context: Context) => Promise<any>, open: (into: HTMLElement, context: Context) => () => Promise<void>, when?: () => boolean}} View */

/** @type {State} */
const state = { run: 0, view: "", metric: "", panel: "", phase: "", label: "", seed: 0, axis: "rounds", round: null, client: null, hidden: new Set(), eachSeed: false, bands: true, sort: "number", down: false, filter: "", paint: "value" };
/** @type {Record<string, View>} */
const views = {
  agents: { title: "Agents", reads: federation.reads, open: federation.open, when: () => context.about.federation },
  curves: { title: "Curves", reads: curves.reads, open: curves.open, when: hasRuns },
  clients: { title: "Clients", reads: clients.reads, open: clients.open, when: hasRuns },
  matrix: { title: "Rounds", reads: matrix.reads, open: matrix.open, when: hasRuns },
  distribution: { title: "Distribution", reads: distribution.reads, open: distribution.open, when: hasRuns },
  models: { title: "Models", reads: models.reads, open: models.open, when: hasRuns },
  settings: { title: "Settings and cautions", reads: settings.reads, open: settings.open, when: hasRuns },
};
function hasRuns() { return context.overviews.length > 0; }
/** @type {Context} */
const context = {
  state,
  about: {},
  overviews: [],
  run: () => context.overviews[state.run],
  metrics: () => context.run().metrics,
  panels: () => Object.assign({}, ...context.overviews.map((run) => run.panels)),
  runChoice: () => (context.overviews.length > 1 ? [choice("Run", context.overviews.map((run, number) => [String(number), run.name]), String(state.run), (value) => { state.run = Number(value); remember(); reopen(); })] : []),
  remember,
  redo: () => { remember(); busy(); void redo(); },
  refresh,
  ask,
  fail,
};
/** @type {(() => Promise<void>) | null} */
let update = null;
let opened = "";

function remember() {
  const kept = { ...state, hidden: [...state.hidden] };
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(kept))}`);
}

function recall() {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    for (const key of /** @type {(keyof State)[]} */ (Object.keys(state))) {
      if (key === "hidden") { if (Array.isArray(kept.hidden)) state.hidden = new Set(kept.hidden.map(String)); }
      else if (typeof kept[key] === typeof state[key] || key === "round" || key === "client") /** @type {any} */ (state)[key] = kept[key] ?? state[key];
    }
  } catch { /* there is nothing to recall */ }
}

/** Choose what exists instead of what does not. */
function settle() {
  /** @param {string[]} known @param {string} value */
  const known = (known, value) => (known.includes(value) ? value : known[0] ?? "");
  state.view = known(Object.keys(views).filter((name) => views[name].when?.() ?? true), state.view);
  if (!hasRuns()) return;
  state.run = Math.min(Math.max(state.run, 0), context.overviews.length - 1);
  const run = context.run();
  const panels = Object.keys(context.panels());
  state.metric = known(run.metrics.map((one) => one.name), state.metric);
  state.panel = known(panels, state.panel);
  state.phase = known(["final", ...panels.filter((one) => one !== "server")], state.phase);
  state.label = known(run.labels.map((one) => one.label), state.label);
  state.seed = Number(known(run.seeds.map(String), String(state.seed)));
}

function tabs() {
  const names = Object.keys(views).filter((name) => views[name].when?.() ?? true);
  /** @param {string} name */
  const select = (name) => { state.view = name; remember(); reopen(); byId(`tab-${name}`).focus(); };
  redraw(byId("tabs"), () => byId("tabs").replaceChildren(...names.map((name, place) => el("button", {
    type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(name === state.view), "aria-controls": "view", tabindex: name === state.view ? 0 : -1, onclick: () => select(name),
    onkeydown: (/** @type {KeyboardEvent} */ event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); select(names[(place + step + names.length) % names.length]); }
    },
  }, views[name].title))));
  byId("view").setAttribute("aria-labelledby", `tab-${state.view}`);
}

/** Draw the toolbar of the open view again: another view was chosen, or there is more to choose from. */
function reopen() {
  settle();
  tabs();
  opened = signature();
  delete document.body.dataset.drawn;
  if (!state.view) {  // there is no run yet
    update = null;
    byId("view").replaceChildren(el("p", { class: "note" }, "There is no run yet."));
    return;
  }
  const run = context.run();
  if (state.view !== "agents" && !run.metrics.length && ["curves", "clients", "matrix", "distribution", "models"].includes(state.view)) {
    update = null;
    byId("view").replaceChildren(el("p", { class: "note" }, run.status === "running" ? "The first round has not finished yet." : "No round has been measured."));
    return;
  }
  update = views[state.view].open(byId("view"), context);
  busy();
  void redo();
}

/** Somebody chose something and waits for it. New rounds come without this sign. */
function busy() { byId("view").setAttribute("aria-busy", "true"); }

const signature = () => JSON.stringify([state.view, state.run, context.about.operator, context.overviews.map((run) => [run.name, run.metrics, run.labels, run.seeds, run.panels])]);

/** @type {Promise<void> | null} */
let working = null;
let again = false;

/** Bring the open view up to date, one request at a time: what happens meanwhile is one more. */
async function redo() {
  if (working) { again = true; return; }
  do {
    again = false;
    working = (update ? update() : Promise.resolve()).catch(fail);
    await working;
    working = null;
  } while (again);
  byId("view").removeAttribute("aria-busy");
  document.body.dataset.drawn = state.view;
  if (hasRuns()) void lookAhead();
}

const LARGE = 200_000; // pairs of client and round: with more, a view that nobody has read takes a while to open
let ahead = false;

/** Read what the other views of a large run show, once and one after the other: it is at hand when one is opened. */
async function lookAhead() {
  const pairs = context.overviews.map((run) => run.clients * run.cells.reduce((sum, cell) => sum + cell.rounds_done, 0));
  if (ahead || Math.max(...pairs) < LARGE) return;
  ahead = true;
  for (const name of Object.keys(views)) if (views[name].when?.() && hasRuns()) await views[name].reads(context).catch(() => {});
  document.body.dataset.ahead = "done";
}

/** @param {unknown} error */
function fail(error) {
  if (error instanceof Refused && error.status === 401) { void start(); return; }
  if (error instanceof Away) return; // the stream says so
  byId("errors").replaceChildren(el("div", {}, el("span", {}, error instanceof Error ? error.message : String(error)), el("button", { type: "button", onclick: () => byId("errors").replaceChildren() }, "Close")));
}

function overview() {
  const boxes = context.overviews.map((run, number) => {
    const done = run.cells.reduce((sum, cell) => sum + cell.rounds_done, 0);
    const all = (run.rounds ?? 0) * run.cells.length;
    const finished = run.cells.filter((cell) => cell.status === "done").length;
    const words = run.status === "running" && run.control.wish === "pause" ? (run.control.paused === null ? "pausing" : "paused") : run.status;
    const tone = { failed: "bad", interrupted: "bad", degraded: "warn", done: "good", paused: "warn", pausing: "warn" }[words] ?? "";
    const time = run.seconds_left !== null && words !== "paused" ? ["about " + duration(run.seconds_left), "left"] : [duration(run.seconds), "of computing"];
    /** @param {string} big @param {string} small @param {string} [tone] */
    const card = (big, small, tone = "") => el("div", { class: "card" }, el("b", { class: tone }, big), el("span", {}, small));
    const spent = run.epsilon.map((one) => card(`ε ${one.spent.toPrecision(3)}${one.budget ? ` of ${one.budget}` : ""}`, `${one.label}, seed ${one.seed}: ${one.word}`));
    const pooled = run.labels.filter((one) => one.pooled).map((one) => one.label);
    const federated = pooled.length ? `, without ${pooled.join(", ")}` : "";
    return el("div", {},
      context.overviews.length > 1 ? el("h2", {}, run.name) : null,
      el("div", { class: "cards" },
        card(words, run.finished ? `since ${clock(run.finished, true)}` : run.started ? `began ${clock(run.started, true)}` : "not begun", tone),
        card(all ? `${done} of ${all}` : String(done), run.cells.length > 1 ? `rounds; ${finished} of ${run.cells.length} cells` : "rounds"),
        card(time[0], time[1]),
        card(String(run.clients), "clients"),
        card(bytes(run.bytes_up), `sent by clients${federated}`), card(bytes(run.bytes_down), `received by clients${federated}`), ...spent),
      all ? el("progress", { max: all, value: done, "aria-label": `Rounds of ${run.name}` }) : null,
      controls(run, number));
  });
  redraw(byId("overview"), () => byId("overview").replaceChildren(hasRuns() ? el("div", { class: "runs" }, ...boxes) : el("p", { class: "note" }, "The run has not begun yet.")));
  byId("title").textContent = context.overviews.map((run) => run.name).join(", ") || "fedloom serve";
  sayLive();
  byId("where").textContent = context.overviews.map((run) => run.folder).join(", ");
  document.title = `${context.overviews.map((run) => `${run.name}: ${run.status}`).join(", ")} · fedloom`;
}

/** @param {Overview} run @param {number} number */
function controls(run, number) {
  const { wish, running, paused, time } = run.control;
  const since = time ? ` since ${clock(time)}` : "";
  const words = wish === "pause" ? (running ? (paused === null ? "The run pauses after the round that is running." : `Paused after round ${paused}${since}.`) : `A pause is asked for${since}: the run waits when it is started again.`)
    : wish === "stop" ? (running ? "The run stops after the round that is running." : "") : wish ? "control.json in the run’s folder cannot be read: it is ignored." : "";
  const said = words ? el("p", { class: "warn" }, words) : null;
  if (!context.about.operator) {
    return el("div", {}, said, running || wish === "pause" ? askForToken(number) : null);
  }
  /** @param {string} wanted */
  const send = (wanted) => post(`runs/${number}/control`, { wish: wanted }).then(() => refresh()).catch(fail);
  const buttons = [
    running && !wish ? el("button", { type: "button", onclick: () => send("pause") }, "Pause") : null,
    wish === "pause" ? el("button", { type: "button", onclick: () => send("continue") }, "Continue") : null,
    running && wish !== "stop" ? el("button", { type: "button", onclick: async () => { if (await ask(`Stop ${run.name} after the round that is running? The command that started it continues it later.`, "Stop the run")) void send("stop"); } }, "Stop") : null,
    el("button", { type: "button", onclick: () => post("logout", {}).then(start).catch(fail) }, "Forget the token"),
  ];
  return el("div", {}, said, el("div", { class: "bar" }, ...buttons.filter((one) => one !== null)));
}

/** @type {Map<number, HTMLElement>} */
const forms = new Map();

/** The form of a run, always the same one: a new round must not close it, or empty it while somebody types. @param {number} number */
function askForToken(number) {
  const made = forms.get(number) ?? el("details", {}, el("summary", {}, "Pause or stop"), loginForm(`token-${number}`));
  forms.set(number, made);
  return made;
}

/** @param {string} id */
function loginForm(id) {
  const input = el("input", { type: "password", id, autocomplete: "off", required: true, size: 34 });
  const said = el("p", { class: "bad", role: "alert" });
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    try {
      await post("login", { token: input.value });
      forms.clear();
      await start();
    } catch (error) {
      said.textContent = error instanceof Error ? error.message : String(error);
    }
  };
  return el("form", { onsubmit: submit }, el("div", { class: "bar" }, el("label", { for: id }, "The operator’s token", input), el("button", { type: "submit" }, "Use it")), said);
}

/** @param {string} words @param {string} button @returns {Promise<boolean>} */
function ask(words, button) {
  return new Promise((answer) => {
    const made = el("dialog", { "aria-label": button, onclose: () => { answer(made.returnValue === "yes"); made.remove(); } },
      el("p", {}, words), el("form", { method: "dialog" }, el("div", { class: "bar" }, el("button", { value: "no" }, "Cancel"), el("button", { value: "yes" }, button))));
    document.body.append(made);
    made.showModal();
  });
}

/** Ask how far the runs are; the stream says it without being asked. */
async function refresh() {
  try {
    await show(await get("runs"), true);
  } catch (error) { fail(error); }
}

/** @param {Overview[]} overviews @param {boolean} changed */
async function show(overviews, changed) {
  context.overviews = overviews;
  settle();
  overview();
  if (signature() !== opened) reopen();
  else if (changed) await redo();
}

/** @type {EventSource | null} */
let stream = null;

/** Say whether there is more to come. A run that is done may still be continued with more rounds, so the stream stays open. */
function sayLive() {
  if (stream?.readyState !== EventSource.OPEN) return;
  const over = hasRuns() && !context.about.federation && context.overviews.every((run) => ["done", "degraded"].includes(run.status));
  byId("live").textContent = over ? "Finished" : "Live";
  byId("live").className = over ? "over" : "on";
}

function listen() {
  stream?.close();
  stream = new EventSource("api/events");
  stream.onopen = sayLive;
  stream.onerror = () => {
    byId("live").textContent = "Reconnecting …";
    byId("live").className = "";
    if (stream?.readyState === EventSource.CLOSED) setTimeout(start, 1000); // it was refused: ask again what is allowed
  };
  stream.onmessage = (event) => {
    const { runs, changed, error } = JSON.parse(event.data);
    if (changed) forget();
    if (error) fail(new Error(error));
    else void show(runs, changed);
  };
}

/** Look while the page is visible: nobody needs a hidden one, and a browser has few connections to a host for all its pages. */
function attend() {
  if (!stream || context.about.locked) return;
  if (document.hidden) {
    stream.close();
    byId("live").textContent = "Hidden";
    byId("live").className = "";
  } else if (stream.readyState === EventSource.CLOSED) listen();
}

/** What agents do changes without a word in the run's database. */
function lookAtAgents() {
  if (!context.about.federation || stream?.readyState !== EventSource.OPEN) return;
  void (!hasRuns() ? refresh() : state.view === "agents" ? redo() : federation.reads().catch(fail));
}

async function start() {
  try {
    context.about = await get("page");
  } catch { setTimeout(start, 1000); return; }
  byId("footer").textContent = `fedloom ${context.about.version}. Nothing on this page comes from elsewhere. fedloom report writes the page to hand in.`;
  byId("locked").hidden = !context.about.locked;
  byId("page").hidden = context.about.locked;
  if (context.about.locked) { stream?.close(); byId("alerts").replaceChildren(); byId("live").textContent = "Locked"; byId("locked-form").replaceChildren(loginForm("token")); return; }
  opened = "";
  listen(); // what it says first is that all runs have changed
}

let timer = 0;
addEventListener("resize", () => { clearTimeout(timer); timer = window.setTimeout(() => void redo(), 120); });
onTheme(() => void redo());
document.addEventListener("visibilitychange", attend);
setInterval(() => { attend(); lookAtAgents(); }, 1000);
addEventListener("unhandledrejection", (event) => fail(event.reason));
recall();
void start();
