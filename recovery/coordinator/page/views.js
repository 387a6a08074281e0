// The sections of the page. Each draws one part of the fleet's answer into its element.
import {bytes, duration, element, haveMap, link, moment, name, number, percent, phaseBar, phaseText, plural, rate, replace,
        shape, shownOf, sync, tag} from "./format.js";

// States of a host: letter in its cell, and whether it is trouble.
const kStates = {
  alive: ["", "alive"],
  suspect: ["S", "suspect: silent"],
  flapping: ["F", "flapping: died repeatedly"],
  quarantined: ["Q", "quarantined: served wrong bytes"],
  dead: ["D", "dead"],
};
const kPhases = ["detect", "plan", "register", "wire", "install", "ready"];
const kRoundPhases = ["gathering", "meeting", "spreading", "loading"];
const kShownRows = 200;
const kShownFeeds = 20;
const kTrouble = new Set(["dead", "quarantined", "flapping", "suspect"]);

const $ = (id) => document.getElementById(id);
const stateOf = (node) => node.state || "alive";
const copiesOf = (node) => node.copies || [];

// What the filter compares with.
function matches(view, ...texts) {
  return view.filter === "" || texts.some((text) => text !== undefined && text.toLowerCase().includes(view.filter));
}

const versionsOf = (view, node) => copiesOf(node).map(([at]) => view.answer.versions[at].id);

function describe(view, node) {
  const words = [stateOf(node)];
  if (node.drained) words.push("drained");
  if (node.pulls) words.push("pulls");
  if (node.pullers) words.push(`feeds ${node.pullers}`);
  const copies = copiesOf(node).map(([at, share]) =>
    view.answer.versions[at].id + (share < 1 ? ` ${percent(share)}` : ""));
  words.push(copies.length > 0 ? copies.slice(0, 3).join(", ") + (copies.length > 3 ? ", …" : "") : "no copies");
  return words.join(", ");
}

function look(view, node) {
  const state = stateOf(node);
  if (state !== "alive") return [state, kStates[state]?.[0] ?? "?"];
  if (node.drained) return ["drained", "–"];
  if (node.pulls) return ["pulling", "↓"];
  if (node.pullers) return ["feeding", "↑"];
  return copiesOf(node).length > 0 ? ["holding", ""] : ["empty", ""];
}

function cell(view, node, rack) {
  const [kind, letter] = look(view, node);
  const label = `${node.id}: ${describe(view, node)}${rack === "" ? "" : `, rack ${rack}`}`;
  return element("li", {}, element("a", {
    href: `#host/${encodeURIComponent(node.id)}`, class: `cell ${kind}${view.chosen === node.id ? " chosen" : ""}`,
    "aria-label": label, title: label, tabindex: "-1"}, letter));
}

export function hosts(view) {
  const racks = new Map();
  let shown = 0;
  for (const node of view.answer.nodes) {
    const rack = node.domain || "";
    if (!matches(view, node.id, rack, node.address, stateOf(node), ...versionsOf(view, node))) continue;
    if (!racks.has(rack)) racks.set(rack, []);
    racks.get(rack).push(node);
    ++shown;
  }
  $("hosts-count").textContent = shownOf(shown, view.answer.nodes.length, "host");
  const order = [...racks.keys()].sort((a, b) => a.localeCompare(b, undefined, {numeric: true}));
  sync($("racks"), order, (rack) => `rack ${rack}`, () => "", (rack) => element("div", {class: "rack"},
    element("h3", {}, rack === "" ? "without a rack" : name(rack), " ", element("small", {})),
    element("ul", {class: "cells"})));
  for (const box of $("racks").children) {
    const rack = box.dataset.key.slice("rack ".length);
    const nodes = racks.get(rack);
    box.querySelector("small").textContent = String(nodes.length);
    const cells = box.querySelector("ul");
    cells.setAttribute("aria-label", rack === "" ? "hosts without a rack" : `hosts of rack ${rack}`);
    sync(cells, nodes, (node) => node.id,
         (node) => [look(view, node), describe(view, node), view.chosen === node.id].join(), (node) => cell(view, node, rack));
  }
  // One stop for the tabulator; arrows go on from there.
  const links = $("racks").querySelectorAll("a");
  if (links.length > 0 && $("racks").querySelector('a[tabindex="0"]') === null) links[0].tabIndex = 0;
}

export function legend() {
  const entries = [["holding", "", "holds copies"], ["empty", "", "empty"], ["pulling", "↓", "pulls"],
                   ["feeding", "↑", "feeds others"], ["drained", "–", "drained"], ["suspect", "S", "suspect"],
                   ["flapping", "F", "flapping"], ["quarantined", "Q", "quarantined"], ["dead", "D", "dead"]];
  replace($("legend"), ...entries.map(([kind, letter, text]) =>
    element("span", {}, element("span", {class: `cell ${kind}`, "aria-hidden": "true"}, letter), text)));
  replace($("phase-legend"), ...kPhases.map((phase, i) =>
    element("span", {}, element("span", {class: `swatch p${i}`, "aria-hidden": "true"}), phase)));
}

function count(term, value, note) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, value, " ", element("small", {}, note)));
}

export function counts(view) {
  const {answer} = view;
  const alive = answer.nodes.filter((node) => stateOf(node) === "alive").length;
  const ready = answer.versions.filter((version) => version.state === "ready").length;
  const rounds = answer.rounds.filter((round) => round.phase !== "over").length;
  const entries = [
    ["Hosts alive", number(alive), `of ${number(answer.nodes.length)}`],
    ["Versions ready", number(ready), `of ${number(answer.versions.length)}`],
    ["Pulls", number(answer.pulls_total), answer.waiting > 0 ? `${number(answer.waiting)} wait` : rate(answer.pulls_rate)],
    ["Updates", String(rounds), rounds > 0 ? "running" : ""],
    ["Instances committed", number(answer.instances_committed), `of ${number(answer.instances_total)}`],
    ["Epoch", String(answer.epoch), answer.grace ? "just started" : ""],
  ];
  sync($("counts"), entries, ([term]) => term, (entry) => entry.join(), (entry) => count(...entry));
}

function problemsOf(view) {
  const {answer} = view;
  const found = [];
  const add = (key, look_, ...parts) => found.push({key, look: look_, parts});
  if (answer.grace) add("grace", "note", "The coordinator has just started. Agents have yet to report.");
  for (const state of ["dead", "quarantined", "flapping", "suspect"]) {
    const nodes = answer.nodes.filter((node) => stateOf(node) === state);
    if (nodes.length === 0) continue;
    const named = nodes.slice(0, 8).flatMap((node, i) => [i === 0 ? " " : ", ", link("host", node.id)]);
    add(state, "", `${plural(nodes.length, "host")} ${kStates[state][1]}:`, ...named,
        nodes.length > 8 ? ` and ${nodes.length - 8} more` : "");
  }
  for (const version of answer.versions) {
    if (version.state === "staging") {
      add(`staging ${version.id}`, "", link("version", version.id), " is not ready: no live hosts hold all of it.");
    }
    if (version.short) {
      add(`short ${version.id}`, "", link("version", version.id),
          ` has ${version.whole_copies} of ${plural(version.replicas, "whole copy", "whole copies")}: `, name(version.short));
    }
  }
  const unfit = answer.instances.filter((instance) => instance.state === "unfit");
  for (const instance of unfit) {
    add(`unfit ${instance.name}`, "", "Instance ", name(instance.name), " is unfit: ", name(instance.why || "no reason given"));
  }
  const more = answer.instances_unfit - unfit.length;
  if (more > 0) add("more unfit", "", `${plural(more, "more instance is", "more instances are")} unfit.`);
  const drained = answer.nodes.filter((node) => node.drained).length;
  if (drained > 0) add("drained", "note", `${plural(drained, "host is", "hosts are")} drained.`);
  if (answer.waiting > 0) add("waiting", "note", `${plural(answer.waiting, "pull waits", "pulls wait")} for a free source.`);
  if (found.length === 0) add("fine", "fine", answer.nodes.length > 0 ? "Nothing is wrong." : "No agent has registered yet.");
  return found;
}

export function problems(view) {
  sync($("problems"), problemsOf(view), (problem) => problem.key,
       (problem) => problem.parts.map((part) => part.textContent ?? part).join(""),
       (problem) => element("li", {class: problem.look}, ...problem.parts));
}

// The hosts with copies of the version at this place of the answer. A host may have several layouts of it.
const holdersOf = (view, at) => view.answer.nodes
  .map((node) => ({node, copies: copiesOf(node).filter(([place]) => place === at)})).filter(({copies}) => copies.length > 0);

const versionLook = {ready: "good", staging: "warn", retiring: ""};

export function versions(view) {
  const rows = view.answer.versions.map((version, at) => {
    const holders = holdersOf(view, at);
    const whole = holders.filter((holder) => holder.copies.some(([, share, verified]) => share >= 1 && verified)).length;
    return {...version, whole, parts: holders.length - whole};
  }).filter((version) => matches(view, version.id, version.state)).reverse();
  const shown = rows.slice(0, kShownRows);
  $("versions-count").textContent = shownOf(shown.length, view.answer.versions.length, "version");
  $("versions").querySelector(".scroll").hidden = shown.length === 0;
  sync($("version-rows"), shown, (version) => version.id, (version) => JSON.stringify(version), (version) => element("tr", {},
    element("th", {scope: "row"}, link("version", version.id)),
    element("td", {}, tag(version.state, versionLook[version.state])),
    element("td", {class: "number"}, bytes(version.bytes)),
    element("td", {class: "number"}, version.replicas > 0 ? `${version.whole_copies} of ${version.replicas}` : String(version.whole_copies)),
    element("td", {}, plural(version.whole, "host") + (version.parts > 0 ? `, parts on ${number(version.parts)}` : ""),
            ...(version.copying_to ? [", copied to ", link("host", version.copying_to)] : []))));
}

const shareOf = (pull) => (pull.total > 0 ? Math.min(1, pull.done / pull.total) : 0);
const leftOf = (pull) => (pull.rate > 0 && pull.total > pull.done ? duration(((pull.total - pull.done) / pull.rate) * 1000) : "–");

function progress(pull) {
  const parts = [`${percent(shareOf(pull))} of ${bytes(pull.total)}`];
  if (pull.have) parts.push(haveMap(pull.have));
  return parts;
}

const liveSources = (pull) => pull.sources.filter((source) => !source.lost && source.bytes > 0)
  .sort((a, b) => b.rate - a.rate);

function from(pull) {
  const sources = liveSources(pull);
  const named = sources.slice(0, 4).flatMap((source, i) => [i === 0 ? "" : ", ", link("host", source.node), ` ${rate(source.rate)}`]);
  const lost = pull.sources.filter((source) => source.lost).length;
  return [...named, sources.length > 4 ? ` and ${sources.length - 4} more` : "", lost > 0 ? ` (${lost} lost)` : ""];
}

// Sources on the left, pullers on the right, a line for each pair; its width is the rate.
function feeds(pulls) {
  const pairs = pulls.flatMap((pull) => liveSources(pull).map((source) => ({from: source.node, to: pull.node, rate: source.rate})));
  const most = Math.max(1, ...pairs.map((pair) => pair.rate));
  const left = [...new Set(pairs.map((pair) => pair.from))].slice(0, kShownFeeds);
  const right = [...new Set(pairs.map((pair) => pair.to))].slice(0, kShownFeeds);
  if (pairs.length === 0) return [];
  const height = Math.max(left.length, right.length) * 20 + 8;
  const y = (list, node) => (list.indexOf(node) + 0.5) * ((height - 8) / list.length) + 4;
  const short = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);
  const image = shape("svg", {class: "feeds", viewBox: `0 0 600 ${height}`, role: "img",
                              "aria-label": `${plural(left.length, "source")} feed ${plural(right.length, "host")}; the table lists them`});
  for (const pair of pairs) {
    if (!left.includes(pair.from) || !right.includes(pair.to)) continue;
    const a = y(left, pair.from);
    const b = y(right, pair.to);
    image.append(shape("path", {d: `M 190 ${a} C 300 ${a}, 300 ${b}, 410 ${b}`, "stroke-width": Math.max(1, (pair.rate / most) * 7)}));
  }
  for (const node of left) image.append(shape("text", {x: 184, y: y(left, node) + 4, "text-anchor": "end"}, short(node)));
  for (const node of right) image.append(shape("text", {x: 416, y: y(right, node) + 4}, short(node)));
  return [image];
}

export function pulls(view) {
  const shown = view.answer.pulls.filter((pull) =>
    matches(view, pull.node, pull.version, ...pull.sources.map((source) => source.node)));
  const total = view.answer.pulls_total;
  $("pulls-count").textContent = shownOf(shown.length, total, "pull");
  $("pulls").querySelector(".scroll").hidden = shown.length === 0;
  replace($("feeds"), ...(total === 0 ? [element("p", {class: "nothing"}, "No pull runs.")] : feeds(shown)));
  sync($("pull-rows"), shown, (pull) => pull.id, (pull) => JSON.stringify(pull), (pull) => element("tr", {},
    element("th", {scope: "row"}, link("pull", pull.id, name(pull.node))),
    element("td", {}, link("version", pull.version), ...(pull.shard && pull.shard !== "whole" ? [" ", name(pull.shard)] : [])),
    element("td", {}, ...progress(pull)),
    element("td", {class: "number"}, rate(pull.rate)),
    element("td", {class: "number"}, leftOf(pull)),
    element("td", {}, ...from(pull))));
}

function bar(title, phases, order, longest, ...more) {
  const total = phases.reduce((sum, [, us]) => sum + us, 0);
  return element("li", {}, element("div", {class: "line"}, ...title, element("span", {class: "took"}, duration(total / 1000))),
                 phaseBar(phases, longest, order), element("div", {class: "parts"}, phaseText(phases)), ...more);
}

const sum = (phases) => phases.reduce((total, [, us]) => total + us, 0);

export function rounds(view) {
  const shown = view.answer.rounds.filter((round) => matches(view, round.version, round.group)).reverse();
  $("updates-count").textContent = plural(shown.length, "update");
  if (shown.length === 0) {
    replace($("rounds"), element("p", {class: "nothing"}, "No update has run since this coordinator leads."));
    return;
  }
  if ($("rounds").querySelector("p") !== null) replace($("rounds"));
  sync($("rounds"), shown, (round) => round.round, (round) => JSON.stringify(round), (round) => {
    const phases = kRoundPhases.map((phase) => [phase, round.phases[phase]]);
    const members = round.members.slice(0, 64);
    const longest = Math.max(1, ...members.map((member) => sum(member.phases || [])));
    const names = [...new Set(members.flatMap((member) => (member.phases || []).map(([phase]) => phase)))];
    return element("div", {},
      element("ul", {class: "bars"}, bar([link("version", round.version), " ", round.group ? name(`group ${round.group}`) : "", " ",
        tag(round.phase, round.phase === "over" ? "good" : "busy")], phases, kRoundPhases, sum(phases))),
      element("ul", {class: "bars"}, ...members.map((member) => bar(
        [link("host", member.node), " ", name(`${member.instance}/${member.rank}`), " ",
         tag(member.state, member.state === "ready" ? "good" : member.state === "failed" ? "bad" : "busy"),
         member.bytes > 0 ? ` ${bytes(member.spread)} of ${bytes(member.bytes)} by broadcast` : "", member.why ? name(` ${member.why}`) : ""],
        member.phases || [], names, longest))),
      round.members_total > members.length ? element("p", {class: "nothing"}, `and ${round.members_total - members.length} more ranks`) : "");
  });
}

// "chat/0 on host-a", or the host alone.
const who = (event) => [...(event.instance ? [name(event.rank === undefined ? event.instance : `${event.instance}/${event.rank}`), " "] : []),
                        ...(event.node ? [event.instance ? "on " : "", link("host", event.node), " "] : [])];

// Each term counts its events anew.
const keyIn = (view) => (event) => `${view.answer.term} ${event.number}`;

export function recoveries(view) {
  const shown = view.events.filter((event) => event.kind === "committed" && event.phases &&
    matches(view, event.node, event.instance, event.version)).slice(-30).reverse();
  $("recoveries-count").textContent = shown.length > 0 ? `the last ${shown.length}` : "";
  const longest = Math.max(1, ...shown.map((event) => sum(event.phases)));
  if (shown.length === 0) {
    replace($("recovery-rows"), element("li", {class: "nothing"}, "No worker has got its weights since this coordinator leads."));
    return;
  }
  sync($("recovery-rows"), shown, keyIn(view), () => longest, (event) => bar(
    [...who(event), ...(event.version ? [link("version", event.version)] : []), event.rung ? tag(event.rung) : "",
     moment(event.ms, view.now)], event.phases, kPhases, longest));
}

export function instances(view) {
  const shown = view.answer.instances.filter((instance) =>
    matches(view, instance.name, instance.version, instance.state, ...instance.nodes)).slice(0, kShownRows);
  $("instances-count").textContent = shownOf(shown.length, view.answer.instances_total, "instance");
  $("instances").querySelector(".scroll").hidden = shown.length === 0;
  const looks = {committed: "good", loading: "busy", unfit: "bad"};
  sync($("instance-rows"), shown, (instance) => instance.name, (instance) => JSON.stringify(instance),
    (instance) => element("tr", {}, element("th", {scope: "row"}, name(instance.name)),
      element("td", {}, tag(instance.state, looks[instance.state])), element("td", {}, link("version", instance.version)),
      element("td", {class: "number"}, `${instance.loaded} of ${instance.world}`),
      element("td", {}, ...instance.nodes.slice(0, 8).flatMap((node, i) => [i === 0 ? "" : ", ", link("host", node)])),
      element("td", {}, name(instance.why || ""))));
}

const kBad = new Set(["node_dead", "node_suspect", "node_quarantined", "node_flapping", "version_not_ready", "pull_failed",
                      "pull_lost", "died", "failed", "unfit", "device_failed", "copy_rotten", "copy_lost"]);
const kGood = new Set(["node_joined", "node_back", "version_ready", "pull_done", "committed", "ready", "copy_mended", "round_over"]);

const kindText = (kind) => kind.replaceAll("_", " ");

function eventText(event) {
  const parts = [...who(event)];
  if (event.kind === "pull_opened" && event.why === "whole") event = {...event, why: ""};
  if (event.version) parts.push(link("version", event.version), " ");
  if (event.bytes > 0) parts.push(`${bytes(event.bytes)} `);
  if (event.elapsed_us > 0) parts.push(`in ${duration(event.elapsed_us / 1000)} `);
  if (event.why) parts.push(name(event.why));
  return parts;
}

export const eventRow = (event, now) => element("li", {}, moment(event.ms, now),
  element("span", {}, tag(kindText(event.kind), kBad.has(event.kind) ? "bad" : kGood.has(event.kind) ? "good" : "")),
  element("span", {}, ...eventText(event)));

export function events(view) {
  const shown = view.events.filter((event) =>
    matches(view, event.kind, kindText(event.kind), event.node, event.instance, event.version, event.why)).slice(-kShownRows).reverse();
  $("events-count").textContent = shownOf(shown.length, view.answer.last_event, "event");
  sync($("event-rows"), shown, keyIn(view), () => "", (event) => eventRow(event, view.now));
}

// For screen readers: what went wrong or came back since the last look.
export function news(fresh) {
  const told = fresh.filter((event) => event.kind.startsWith("node_") || kBad.has(event.kind)).slice(-3)
    .map((event) => [event.node || event.instance || event.version, kindText(event.kind)].join(" "));
  if (told.length > 0) $("news").textContent = told.join("; ");
}

const facts = (...entries) => element("dl", {class: "facts"}, ...entries.filter(([, value]) => value !== "" && value !== undefined)
  .flatMap(([term, value]) => [element("dt", {}, term), element("dd", {}, ...[value].flat())]));

function table(head, rows) {
  return element("div", {class: "scroll"}, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {scope: "col"}, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value, i) =>
      element(i === 0 ? "th" : "td", i === 0 ? {scope: "row"} : {}, ...[value].flat())))))));
}

function eventsOf(view, chosen) {
  const rows = view.events.filter(chosen).slice(-20).reverse();
  return rows.length === 0 ? [] : [element("h3", {}, "Events"), element("ol", {class: "events"}, ...rows.map((event) => eventRow(event, view.now)))];
}

function hostDetail(view, id) {
  const node = view.answer.nodes.find((each) => each.id === id);
  if (node === undefined) return null;
  const state = stateOf(node);
  const pull = view.answer.pulls.find((each) => each.node === id);
  return [
    facts(["State", tag(state, state === "alive" ? "good" : kTrouble.has(state) ? "bad" : "")],
          ["Heard", node.heard_ms === undefined ? "" : moment(node.heard_ms, view.now)],
          ["Drained", node.drained ? "gets no new pulls" : ""], ["Address", name(node.address)],
          ["Rack", node.domain ? name(node.domain) : ""], ["Free in the store", node.free ? bytes(node.free) : "0 B"],
          ["Pulls that read here", String(node.pullers || 0)],
          ["Goodput beside others", node.health === undefined ? "" : percent(node.health)],
          ["Pulls", pull ? link("pull", pull.id, name(pull.version)) : node.pulls ? plural(node.pulls, "pull") : ""]),
    element("h3", {}, "Copies"),
    copiesOf(node).length === 0 ? element("p", {class: "nothing"}, "None.") : table(["Version", "Share", "Verified"],
      copiesOf(node).map(([at, share, verified]) => [link("version", view.answer.versions[at].id), percent(share), verified ? "yes" : "not as a whole"])),
    ...eventsOf(view, (event) => event.node === id),
  ];
}

function versionDetail(view, id) {
  const at = view.answer.versions.findIndex((each) => each.id === id);
  if (at < 0) return null;
  const version = view.answer.versions[at];
  const holders = holdersOf(view, at);
  return [
    facts(["State", tag(version.state, versionLook[version.state])], ["Size", bytes(version.bytes)],
          ["Whole copies", version.replicas > 0 ? `${version.whole_copies} of ${version.replicas} wanted` : String(version.whole_copies)],
          ["Short because", version.short ? name(version.short) : ""],
          ["Copied to", version.copying_to ? link("host", version.copying_to) : ""]),
    element("h3", {}, "Held by ", plural(holders.length, "host")),
    table(["Host", "Rack", "Share", "Verified"], holders.slice(0, kShownRows).flatMap(({node, copies}) => copies.map(([, share, verified]) =>
      [link("host", node.id), name(node.domain || ""), percent(share), verified ? "yes" : "not as a whole"]))),
    holders.length > kShownRows ? element("p", {class: "nothing"}, `and ${holders.length - kShownRows} more`) : "",
    ...eventsOf(view, (event) => event.version === id),
  ];
}

function pullDetail(view, id) {
  const pull = view.pull ?? view.answer.pulls.find((each) => each.id === id);
  const ended = view.events.findLast?.((event) => event.pull === id && event.kind !== "pull_opened");
  if (pull === undefined) {
    return ended ? [facts(["Ended", moment(ended.ms, view.now)], ["Result", tag(kindText(ended.kind), kGood.has(ended.kind) ? "good" : "bad")],
                          ["", eventText(ended)])] : null;
  }
  return [
    facts(["To", link("host", pull.node)], ["Version", link("version", pull.version)], ["Shard", pull.shard ? name(pull.shard) : ""],
          ["Opened", moment(pull.opened_ms, view.now)], ["Progress", `${bytes(pull.done)} of ${bytes(pull.total)}, ${percent(shareOf(pull))}`],
          ["Rate", rate(pull.rate)], ["Left", leftOf(pull)]),
    ...(pull.have ? [element("h3", {}, "Tiles that it has"), haveMap(pull.have, true)] : []),
    element("h3", {}, "Sources"),
    table(["Host", "Bytes", "Rate", "State"], pull.sources.map((source) => [link("host", source.node), bytes(source.bytes), rate(source.rate),
      source.wrong_bytes ? "served wrong bytes" : source.lost ? name(`lost: ${source.cause || "no reason given"}`) : source.failures ? plural(source.failures, "failure") : "fine"])),
  ];
}

const kDetails = {host: hostDetail, version: versionDetail, pull: pullDetail};

export function detail(view) {
  const [kind, id] = view.selected;
  const pane = $("detail");
  if (!Object.hasOwn(kDetails, kind)) {
    pane.hidden = true;
    return;
  }
  const body = kDetails[kind](view, id);
  replace($("detail-title"), `${kind[0].toUpperCase()}${kind.slice(1)} `, name(kind === "pull" ? id.slice(0, 8) : id));
  const focused = $("detail-body").contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  replace($("detail-body"), ...(body ?? [element("p", {class: "nothing"}, `There is no such ${kind} now.`)]));
  if (focused !== null) [...$("detail-body").querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
  pane.hidden = false;
}

// A coordinator that does not lead has nothing else to show.
export function standby(why) {
  replace($("counts"));
  sync($("problems"), [why], () => "standby", () => why,
       () => element("li", {class: "note"}, "This coordinator stands by: ", name(why), ". Its page shows the fleet once it leads."));
}
