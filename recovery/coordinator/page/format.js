// Texts and elements. Everything from the network becomes text nodes, never markup.

const kUnits = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const kSvg = "http://www.w3.org/2000/svg";

export function bytes(count) {
  let unit = 0;
  let value = Number(count) || 0;
  while (value >= 1024 && unit + 1 < kUnits.length) {
    value /= 1024;
    ++unit;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(value >= 10 ? 1 : 2)} ${kUnits[unit]}`;
}

export const rate = (perSecond) => (perSecond > 0 ? `${bytes(perSecond)}/s` : "–");

export function duration(ms) {
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function ago(ms, now) {
  const seconds = Math.max(0, Math.round((now - ms) / 1000));
  return seconds < 60 ? `${seconds} s ago` : `${duration(seconds * 1000).replace(/ \d+ (s|min)$/, "")} ago`;
}

export const percent = (share) => `${share > 0 && share < 0.01 ? "<1" : Math.floor(share * 100)} %`;

export const number = (count) => count.toLocaleString("en-US");

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// "100 of 2,340 pulls", or "7 pulls" if all are shown.
export const shownOf = (shown, total, one) => (shown < total ? `${number(shown)} of ` : "") + plural(total, one);

// Children are nodes, or texts.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(kSvg, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A name from the network: its direction does not spread to the text around it.
export const name = (text) => element("bdi", {}, String(text));

export const link = (kind, id, ...shown) =>
  element("a", {href: `#${kind}/${encodeURIComponent(id)}`}, ...(shown.length > 0 ? shown : [name(id)]));

export const tag = (text, look = "") => element("span", {class: `tag ${look}`}, text);

// A moment, relative; refresh() keeps it true. Hovering shows the absolute time.
export function moment(ms, now) {
  const at = new Date(ms);
  const known = !Number.isNaN(at.getTime());
  return element("time", {datetime: known ? at.toISOString() : "", title: known ? at.toLocaleString() : "",
                          "data-ms": ms}, ago(ms, now));
}

export function refresh(now) {
  for (const time of document.querySelectorAll("time[data-ms]")) {
    const text = ago(Number(time.dataset.ms), now);
    if (time.textContent !== text) time.textContent = text;
  }
}

// Makes `parent` have one child for each item, in order. A child is made anew only when what `look`
// returns for its item has changed, so that focus and scroll positions stay.
export function sync(parent, items, key, look, make) {
  const before = new Map();
  for (const child of parent.children) before.set(child.dataset.key, child);
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    const seen = String(look(item));
    let child = before.get(id);
    before.delete(id);
    if (child !== undefined && child.dataset.look === seen) {
      if (child === at) at = at.nextElementSibling;
      else parent.insertBefore(child, at);
      continue;
    }
    const made = make(item);
    made.dataset.key = id;
    made.dataset.look = seen;
    if (child !== undefined) {
      const focused = child.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      if (child === at) at = at.nextElementSibling;
      child.remove();
      parent.insertBefore(made, at);
      if (focused !== null) [...made.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
    } else {
      parent.insertBefore(made, at);
    }
  }
  for (const child of before.values()) child.remove();
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children);
}

// A row of parts of equal width, each "0" (nothing) to "9" (everything).
export function haveMap(cells, large = false) {
  const map = shape("svg", {class: large ? "have large" : "have", viewBox: `0 0 ${cells.length || 1} 1`,
                            preserveAspectRatio: "none", "aria-hidden": "true"});
  let begin = 0;
  const look = (cell) => (cell === "0" ? "h0" : cell === "9" ? "h9" : "h5");
  for (let i = 1; i <= cells.length; ++i) {
    if (i < cells.length && look(cells[i]) === look(cells[begin])) continue;
    map.append(shape("rect", {x: begin, y: 0, width: i - begin, height: 1, class: look(cells[begin])}));
    begin = i;
  }
  return map;
}

// Phases [name, microseconds] as one bar; `longest` is its full width.
export function phaseBar(phases, longest, order) {
  const bar = shape("svg", {class: "bar", viewBox: "0 0 1000 1", preserveAspectRatio: "none", "aria-hidden": "true"});
  let x = 0;
  for (const [phase, us] of phases) {
    const width = longest > 0 ? (us / longest) * 1000 : 0;
    bar.append(shape("rect", {x, y: 0, width, height: 1, class: `p${Math.max(0, order.indexOf(phase)) % 6}`}));
    x += width;
  }
  return bar;
}

export const phaseText = (phases) =>
  phases.filter(([, us]) => us > 0).map(([phase, us]) => `${phase} ${duration(us / 1000)}`).join(", ");
