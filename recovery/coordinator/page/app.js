import {Fleet} from "./fleet.js";
import {ago, refresh} from "./format.js";
import * as views from "./views.js";

const $ = (id) => document.getElementById(id);
const kStale = 3500;
const kArrows = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1};

// "#host/a%20b" names ["host", "a b"].
function selected() {
  const [kind, ...rest] = location.hash.slice(1).split("/");
  try {
    return [kind, decodeURIComponent(rest.join("/"))];
  } catch {
    return ["", ""];
  }
}

const pullIn = ([kind, id]) => (kind === "pull" && /^[0-9a-f]{32}$/.test(id) ? id : "");

function connection() {
  const box = $("connection");
  const text = $("connection-text");
  const age = Date.now() - fleet.heard;
  const lost = fleet.problem !== "" || (fleet.heard > 0 && age > kStale);
  box.className = lost ? "lost" : fleet.heard > 0 ? "live" : "";
  const said = lost
    ? fleet.heard > 0 ? `no connection; what you see is from ${ago(fleet.heard, Date.now())}` : "no connection"
    : fleet.heard > 0 ? (fleet.answer.leading ? "live" : "stands by") : "connecting";
  if (text.textContent !== said) text.textContent = said;
  box.title = lost ? fleet.problem : "";
}

function draw() {
  connection();
  const {answer} = fleet;
  if (answer === null) return;
  document.body.classList.toggle("standby", !answer.leading);
  if (!answer.leading) {
    views.standby(answer.why);
    return;
  }
  const [kind, id] = selected();
  const view = {
    answer, events: fleet.events, pull: fleet.pull, now: Date.now(), selected: [kind, id],
    chosen: kind === "host" ? id : undefined, filter: $("filter").value.trim().toLowerCase(),
  };
  views.counts(view);
  views.problems(view);
  views.hosts(view);
  views.versions(view);
  views.pulls(view);
  views.rounds(view);
  views.recoveries(view);
  views.instances(view);
  views.events(view);
  views.detail(view);
}

const fleet = new Fleet((changed) => {
  views.news(fleet.news);
  if (changed) draw();
  connection();
});

addEventListener("hashchange", () => {
  const [kind, id] = selected();
  fleet.look(pullIn([kind, id]));
  draw();
  if (["host", "version", "pull"].includes(kind)) {
    $("detail").scrollIntoView({block: "nearest"});
    $("detail-title").focus({preventScroll: true});
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("detail").hidden) location.hash = "#main";
  if (event.key === "/" && document.activeElement !== $("filter")) {
    event.preventDefault();
    $("filter").focus();
  }
});
$("filter").addEventListener("input", draw);
$("racks").addEventListener("keydown", (event) => {
  const links = [...$("racks").querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  const to = event.key === "Home" ? 0 : event.key === "End" ? links.length - 1 : at + (kArrows[event.key] ?? 0);
  if (at < 0 || to === at || links[to] === undefined) return;
  event.preventDefault();
  links[at].tabIndex = -1;
  links[to].tabIndex = 0;
  links[to].focus();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) fleet.wake?.();
});
setInterval(() => {
  refresh(Date.now());
  if (fleet.problem !== "" || Date.now() - fleet.heard > kStale) connection();
}, 1000);

views.legend();
fleet.pullId = pullIn(selected());
fleet.run();
