"""The status page in a real browser, on real daemons."""
import json
import signal

import pytest

from fleet import eventually, write_checkpoint

# A node id is printable ASCII; other texts may be anything.
HOSTILE_NAME = "<img/src=x/onerror=window.ran=1>" + "x" * 200
HOSTILE = "<img src=x onerror=\"window.ran=1\"><script>window.ran=1</script>\u202e\u2066" + "x" * 120


def cells(state=""):
    return f"document.querySelectorAll('#racks .cell{'.' + state if state else ''}').length"


def test_the_page_loads_without_an_error_or_a_request_to_another_place(fleet, browser):
    fleet.agent("a", rack="r1")
    page = browser.open(fleet.url())
    page.eventually(cells() + " === 1")
    page.eventually("document.querySelector('#connection').className === 'live'")
    page.eventually("document.querySelector('#problems').innerText === 'Nothing is wrong.'")
    assert page.problems() == []
    assert {url.split("/")[2] for url in page.requests() if not url.startswith("data:")} == {fleet.http}
    page.close()


def test_a_host_that_dies_is_shown_and_told(fleet, browser):
    for name in ("a", "b", "c"):
        fleet.agent(name, rack="r1" if name == "a" else "r2")
    page = browser.open(fleet.url())
    page.eventually(cells() + " === 3")
    assert page.value("document.querySelectorAll('#racks .rack').length") == 2
    fleet.kill("b")
    page.eventually(cells("dead") + " === 1")
    assert page.text("#racks .dead") == "D"
    page.eventually("document.querySelector('#problems').innerText.includes('1 host dead: b')")
    page.eventually("document.querySelector('#news').textContent.includes('b node dead')")
    page.eventually("document.querySelector('#event-rows').innerText.includes('node dead')")
    page.value("document.querySelector('#racks .dead').click()")
    page.eventually("document.querySelector('#detail-title').innerText === 'Host b'")
    assert page.value("document.activeElement.id") == "detail-title"
    fleet.agent("b", rack="r2")
    page.eventually(cells("dead") + " === 0")
    assert page.problems() == []
    page.close()


def test_a_pull_is_seen_while_it_runs_and_after_it(fleet, directory, browser):
    # The pull cannot end before another host has the version, too.
    fleet.agent("a", "--max-rate", "1MiB")
    fleet.agent("b")
    write_checkpoint(directory / "model.safetensors", 96)
    fleet.run("publish", "qwen3@7", directory / "model.safetensors", "--store", directory / "a")
    page = browser.open(fleet.url())
    page.eventually("document.querySelector('#version-rows').innerText.includes('qwen3@7')")
    pull = fleet.start("pull", "qwen3", "--store", directory / "b", "--transport", "tcp")
    page.eventually("document.querySelector('#pull-rows tr .have rect.h9, #pull-rows tr .have rect.h5') !== null")
    page.eventually("document.querySelector('#pull-rows tr')?.innerText.includes('/s')")
    page.eventually("document.querySelector('#feeds svg text')?.textContent === 'a'")
    page.eventually(cells("pulling") + " === 1")
    page.value("document.querySelector('#pull-rows th a').click()")
    page.eventually("document.querySelector('#detail .have.large') !== null")
    fleet.agent("c")
    fleet.run("publish", "qwen3@7", directory / "model.safetensors", "--store", directory / "c")
    assert pull.wait(60) == 0
    page.eventually("document.querySelector('#feeds').innerText === 'No pull runs.'")
    page.eventually("document.querySelector('#detail').innerText.includes('pull done')")
    page.eventually("document.querySelector('#version-rows').innerText.includes('3 hosts')")
    assert page.problems() == []
    page.close()


def test_a_worker_that_dies_and_recovers_is_seen_with_its_phases(fleet, directory, browser):
    fleet.agent("a")
    write_checkpoint(directory / "model.safetensors", 8)
    fleet.run("publish", "qwen3@7", directory / "model.safetensors", "--store", directory / "a")
    supervisor = fleet.worker("a", "qwen3", "chat")
    page = browser.open(fleet.url())
    page.eventually("document.querySelector('#recovery-rows .line')?.innerText.includes('chat/0')")
    assert page.value("document.querySelectorAll('#recovery-rows .bar rect').length") == 6
    fleet.kill_worker(supervisor)
    page.eventually("document.querySelectorAll('#recovery-rows .line').length === 2")
    # Which one depends on whether its agent sees its death or the end of its connection first.
    page.eventually("/died|failed/.test(document.querySelector('#event-rows').innerText)")
    assert "install" in page.text("#recovery-rows .parts")
    assert page.problems() == []
    page.close()


def test_a_thousand_hosts_are_drawn_and_stay_apart(fleet, browser):
    fleet.crowd(1000)
    page = browser.open(fleet.url())
    page.eventually(cells() + " === 1000")
    assert page.value("document.querySelectorAll('#racks .rack').length") == 25
    # Typing into the filter and an answer with news are both drawn.
    page.value("""(() => { const box = document.querySelector('#filter'); box.value = 'r07';
                   box.dispatchEvent(new Event('input')); })()""")
    assert page.value(cells()) == 40
    page.value("""(() => { const box = document.querySelector('#filter'); box.value = '';
                   box.dispatchEvent(new Event('input')); })()""")
    assert page.value(cells()) == 1000
    size = page.value("fetch('api/v1/fleet').then((r) => r.text()).then((t) => t.length)")
    assert size < 200_000
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems() == []
    page.close()


# Draws an answer into the page, and reads it before the next real one comes.
DRAW = """import('/views.js').then((views) => {
  const node = (id, copies, pulls) => ({id, address: id, copies, pulls});
  const pull = (i) => ({id: String(i), node: 'n' + i, version: 'm@1', done: 1, total: 2, rate: 1, opened_ms: 0, sources: []});
  const answer = {
    epoch: 1, waiting: 0, rounds: [], pulls_total: 2340, pulls_rate: 3072, last_event: 5000,
    versions: [{id: 'm@1', state: 'ready', bytes: 1, replicas: 0, whole_copies: 2}],
    nodes: [node('n0', [[0, 1, 1], [0, 0.5, 1]]), node('n1', [[0, 0.5, 1], [0, 0.25, 1]], 1), node('n2', [[0, 1, 1]])],
    pulls: Array.from({length: 100}, (_, i) => pull(i + 500)),
    instances: [{name: 'i', version: 'm@1', state: 'unfit', loaded: 0, world: 1, nodes: []}],
    instances_total: 1200, instances_committed: 1100, instances_unfit: 90,
  };
  const view = {answer, events: [], pull: null, now: 0, filter: '', selected: ['version', 'm@1']};
  for (const part of ['counts', 'problems', 'hosts', 'versions', 'pulls', 'instances', 'detail']) views[part](view);
  return Object.fromEntries(['#pulls-count', '#instances-count', '#counts', '#problems', '#version-rows', '#detail-body']
    .map((place) => [place, document.querySelector(place).innerText.replace(/\\s+/g, ' ')])
    .concat([['pulling', document.querySelectorAll('#racks .cell.pulling').length]]));
})"""


def test_counts_are_of_all_not_of_what_the_answer_lists(fleet, browser):
    page = browser.open(fleet.url())
    page.eventually("document.querySelector('#connection').className === 'live'")
    shown = page.value(DRAW)
    assert shown["#pulls-count"] == "100 of 2,340 pulls" and "3.00 KiB/s" in shown["#counts"]
    assert shown["#instances-count"] == "1 of 1,200 instances" and "1,100 of 1,200" in shown["#counts"]
    assert "89 more instances are unfit" in shown["#problems"]
    assert shown["pulling"] == 1
    # A host with several layouts of a version counts once.
    assert "2 hosts, parts on 1" in shown["#version-rows"] and "Held by 3 hosts" in shown["#detail-body"]
    page.close()


def test_a_coordinator_without_the_old_state_is_not_taken_for_the_old_one(fleet, browser):
    for name in ("a", "b", "c"):
        fleet.agent(name)
    page = browser.open(fleet.url())
    page.eventually("document.querySelectorAll('#event-rows li').length === 4")
    for name in ("a", "b", "c"):
        fleet.kill(name)
    fleet.lose_coordinator()
    fleet.agent("late")
    page.eventually("document.querySelector('#event-rows').innerText.includes('late')")
    rows = page.text("#event-rows")
    assert rows.count("coordinator leads") == 1 and "node joined" in rows and "\nb" not in rows
    page.close()


def test_hostile_names_are_text(fleet, browser):
    fleet.crowd(2, HOSTILE_NAME, HOSTILE)
    page = browser.open(fleet.url(), width=375, height=800)
    page.eventually(cells() + " === 3")
    page.eventually("document.querySelector('#recovery-rows').innerText.includes('onerror')")
    page.value(f"location.hash = '#host/' + encodeURIComponent({json.dumps(HOSTILE_NAME)})")
    page.eventually("document.querySelector('#detail-title').innerText.includes('<img/src=x')")
    assert page.value("document.querySelectorAll('img, main script').length") == 0
    assert page.value("window.ran === undefined")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems() == []
    page.close()


CONTRAST = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.checkVisibility?.() === false) continue;
    if (e.closest('svg, .hidden, .skip, noscript')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 30), (a + 0.05) / (b + 0.05)]);
  }
  return low;
})()"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_light_and_dark_narrow_and_wide_are_readable(fleet, browser, dark, width):
    fleet.agent("a", rack="r1")
    fleet.crowd(50)
    fleet.kill("a")
    page = browser.open(fleet.url("#host/host-0003"), width=width, dark=dark)
    page.eventually(cells("dead") + " === 1")
    page.eventually("document.querySelector('#detail-body').innerText.includes('qwen3@41')")
    background = page.value("getComputedStyle(document.documentElement).backgroundColor")
    red = int(background.split("(")[1].split(",")[0])
    assert red < 64 if dark else red > 192
    assert page.value(CONTRAST) == []
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_the_keyboard_reaches_everything(fleet, browser):
    fleet.crowd(50)
    page = browser.open(fleet.url())
    page.eventually(cells() + " === 50")
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    for _ in range(30):
        page.press("Tab")
        if page.value("document.activeElement.classList.contains('cell')"):
            break
    assert page.value("document.activeElement.getAttribute('href')") == "#host/host-0000"
    page.press("ArrowRight")
    assert page.value("document.activeElement.getAttribute('href')") == "#host/host-0001"
    page.press("End")
    page.press("Enter")
    page.eventually("document.querySelector('#detail-title').innerText === 'Host host-0049'")
    page.press("Escape")
    page.eventually("document.querySelector('#detail').hidden")
    page.close()


def test_a_screen_reader_finds_names_for_everything(fleet, browser):
    fleet.crowd(3)
    page = browser.open(fleet.url("#host/host-0001"))
    page.eventually(cells() + " === 3")
    page.eventually("!document.querySelector('#detail').hidden")
    nodes = page.nodes()
    roles = [role for role, _ in nodes]
    assert {"main", "banner", "navigation", "complementary", "heading", "table", "columnheader", "status"} <= set(roles)
    for role in ("link", "searchbox", "region", "heading", "navigation", "complementary", "columnheader"):
        assert all(name for each, name in nodes if each == role), [each for each in nodes if each[0] == role]
    assert any(role == "link" and name.startswith("host-0001: alive") for role, name in nodes)
    page.close()


def test_a_lost_connection_is_said_and_ends(fleet, browser):
    fleet.crowd(2)
    page = browser.open(fleet.url())
    page.eventually(cells() + " === 2")
    fleet.coordinator_process.send_signal(signal.SIGSTOP)
    page.eventually("document.querySelector('#connection').innerText.startsWith('no connection; what you see is from')")
    assert page.value(cells()) == 2
    fleet.coordinator_process.send_signal(signal.SIGCONT)
    page.eventually("document.querySelector('#connection').className === 'live'")
    page.close()
