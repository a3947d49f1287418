// The operator's view of a federation: who is being waited for and why, what needs somebody, and the keys of agents.

import { byId, bytes, clock, duration, el, get, post, redraw } from "./dom.js";

/** @typedef {import("./page.js").Context} Context */

/** @type {Record<string, string>} */
const TONES = { working: "", idle: "good", refused: "bad", silent: "warn", gone: "bad", revoked: "bad", lost: "bad", failed: "bad", answered: "good", waiting: "warn" };

/** Ask what the coordinator is doing, and show its alerts; those that stay are not read out again. */
export async function reads() {
  const found = await get("federation");
  const shown = [...byId("alerts").children].map((one) => one.textContent);
  if (JSON.stringify(shown) !== JSON.stringify(found.alerts)) byId("alerts").replaceChildren(...found.alerts.map((/** @type {string} */ one) => el("div", {}, one)));
  return found;
}

/** @param {HTMLElement} into @param {Context} context @returns {() => Promise<void>} */
export function open(into, context) {
  const [now, agents, keys, log] = [el("div"), el("div"), el("div"), el("div")];
  const said = el("div", { role: "status" });
  into.replaceChildren(now, el("h2", {}, "Agents"), agents, el("h2", {}, "Invitations"), said, keys, el("h2", {}, "Audit log"), log);
  /** @param {string} deed @param {string} name */
  const act = (deed, name) => post("federation", { deed, name }).then(async (found) => {
    if (deed === "invite") said.replaceChildren(el("p", {}, "A new agent joins once with this token, which is also in ", el("code", {}, found.file), ":"), el("pre", { tabindex: 0 }, `fedloom join ${location.origin} --token ${found.token} --site SITE.toml`));
    await update();
  }).catch(context.fail);

  /** @param {any} call @param {any} found */
  function current(call, found) {
    const cards = [
      ["answers accepted since it started", found.accepted], ["answers rejected", found.rejected],
      ["came in", bytes(found.bytes_in)], ["went out", bytes(found.bytes_out)],
      ["free on the disk", `${bytes(found.disk.free)} of ${bytes(found.disk.total)}`],
      ["in the ledger", bytes(found.disk.ledger)],
      ["free memory", found.memory === null ? "–" : bytes(found.memory)],
    ].map(([small, big]) => el("div", { class: "card" }, el("b", {}, String(big)), el("span", {}, String(small))));
    if (!call) return [el("h2", {}, "Now"), el("p", {}, found.stage), el("div", { class: "cards" }, ...cards)];
    const answered = call.clients.filter((/** @type {any} */ one) => one.state === "answered").length;
    const needed = call.enough ?? call.needed;
    const words = `${answered} of ${call.clients.length} clients have answered${needed ? `; the round needs ${needed}` : ""}. Open for ${duration(call.open_for)}, ${duration(call.seconds_left)} left.`;
    const order = ["refused", "failed", "lost", "waiting", "answered"];
    const rows = [...call.clients].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state)).slice(0, 200).flatMap((one) => {
      const part = one.state === "answered" ? 1 : one.state === "waiting" ? Math.min(call.open_for / call.seconds, 0.98) : 0;
      const label = `${one.name}${one.agent && one.agent !== one.name ? ` (${one.agent})` : ""}`;
      return [el("span", { class: "who" }, label), el("progress", { max: 1, value: part, "aria-label": `${label}: ${one.state}` }), el("span", { class: TONES[one.state] }, one.state === "answered" ? `answered, ${bytes(one.bytes)}` : one.why ? `${one.state}: ${one.why}` : one.state)];
    });
    const more = call.clients.length > 200 ? el("p", { class: "note" }, `${call.clients.length - 200} more clients are not shown.`) : null;
    return [el("h2", {}, "Now"), el("div", { class: "cards" }, ...cards), el("h3", {}, call.title), el("p", {}, words), el("progress", { max: call.seconds, value: Math.min(call.open_for, call.seconds), "aria-label": "Time until the deadline" }), el("div", { class: "meter" }, ...rows), ...(more ? [more] : [])];
  }

  async function update() {
    const found = await reads();
    redraw(now, () => now.replaceChildren(...current(found.call, found)));
    const head = ["agent", "state", "doing", "for", "clients", "last seen", "enrolled", "versions", "action"].map((words, place) => el("th", { class: [0, 1, 2, 7].includes(place) ? "text" : "", scope: "col" }, words));
    const body = found.agents.map((/** @type {any} */ one) => {
      const revoke = async () => { if (await context.ask(`Revoke ${one.name}? Its requests are rejected from now on, and the run goes on without its clients. Only a new token lets it back.`, "Revoke the agent")) await act("revoke", one.agent); };
      const doing = [one.doing, one.why].filter(Boolean).join(": ");
      const versions = Object.entries(one.versions).map(([name, version]) => `${name} ${version}`).join(", ");
      return el("tr", {}, el("th", { class: "text", scope: "row" }, one.name), el("td", { class: `text ${TONES[one.state] ?? ""}` }, one.state), el("td", { class: "text" }, doing), el("td", {}, one.since === null ? "–" : duration(one.since)), el("td", {}, one.awaited ? `${one.awaited} of ${one.clients} awaited` : one.clients), el("td", {}, one.seen === null ? "not yet" : `${duration(one.seen)} ago`), el("td", {}, clock(new Date(1000 * one.enrolled).toISOString())), el("td", { class: "text" }, versions), el("td", {}, one.state === "revoked" ? "" : el("button", { type: "button", "aria-label": `Revoke ${one.name}`, onclick: revoke }, "Revoke")));
    });
    redraw(agents, () => agents.replaceChildren(found.agents.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))) : el("p", { class: "note" }, "No agent has enrolled yet.")));
    const tokens = found.tokens.map((/** @type {any} */ one) => el("li", {}, `Token ${one.name}, ${one.expires === null ? "which does not expire" : `until ${clock(new Date(1000 * one.expires).toISOString())}`} `, el("button", { type: "button", onclick: async () => { if (await context.ask(`Withdraw the token ${one.name}? Nobody can enrol with it then.`, "Withdraw the token")) await act("withdraw", one.name); } }, `Withdraw ${one.name}`)));
    redraw(keys, () => keys.replaceChildren(el("ul", {}, ...tokens), el("button", { type: "button", onclick: () => act("invite", "") }, "Invite an agent")));
    const events = found.events.map((/** @type {any} */ one) => el("tr", {}, el("td", { class: "text" }, clock(new Date(1000 * one.time).toISOString())), el("td", { class: "text" }, one.kind), el("td", { class: "text" }, one.message)));
    redraw(log, () => log.replaceChildren(el("p", { class: "note" }, "The last 200 events. fedloom audit export writes all of them."), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "text", scope: "col" }, "time"), el("th", { class: "text", scope: "col" }, "kind"), el("th", { class: "text", scope: "col" }, "what happened"))), el("tbody", {}, ...events)))));
  }
  return update;
}
