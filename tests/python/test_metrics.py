"""What Prometheus scrapes from real daemons, against the page that lists it and bytes that are known."""
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request

import numpy
import pytest
import safetensors.numpy
from conftest import ROOT, Rekindle, eventually
from test_joint import SHARDS, publish_all, whole_tensors

import rekindle

PAGE = ROOT / "docs/reference/metrics.md"
MODEL = "evil/na.me+x"
NODE = 'b"}\\{le="1"'
SAMPLE = re.compile(r'([a-z_]+)(?:\{(.*)\})? (\S+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


class Scrape:
    """The families of one answer, by name, and all samples."""

    def __init__(self, address):
        self.address = address
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            self.text = answer.read().decode()
        self.types, self.samples = {}, {}
        for line in self.text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                assert name not in self.types, f"{name} comes twice"
                self.types[name] = kind
            elif not line.startswith("#"):
                name, labels, value = SAMPLE.fullmatch(line).groups()
                self.samples[name, tuple(sorted(LABEL.findall(labels or "")))] = float(value)

    def __call__(self, name, **labels):
        return self.samples[name, tuple(sorted(labels.items()))]

    def sum(self, name):
        return sum(value for (of, _), value in self.samples.items() if of == name)

    def labels(self):
        """By family: the names of its labels."""
        found = {name: set() for name in self.types}
        for name, labels in self.samples:
            family = name if name in self.types else name.rsplit("_", 1)[0]
            found[family] |= {label for label, _ in labels if label != "le"}
        return found

    def counts(self):
        """All that may only grow."""
        for (name, labels), value in self.samples.items():
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            if self.types.get(name) == "counter" or self.types.get(base) == "histogram":
                yield (name, labels), value


def page():
    """By name: type and labels, as the page has them."""
    rows = re.findall(r"^\| `(rekindle_\w+)` \| (\w+) \|([^|]*)\|", PAGE.read_text(), re.M)
    assert len(rows) == len({name for name, _, _ in rows})
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


@pytest.fixture(scope="module")
def scraped(memory_directory):
    """Two agents and a coordinator, and one publication, one pull, one attach and some failures. Scrapes
    before and after, and after two joint publications, of which one fails."""
    class Fleet(Rekindle):
        def _daemon(self, role, *arguments):
            arguments = [NODE if argument == "b" else argument for argument in arguments]
            return super()._daemon(role, *arguments, "--metrics", "127.0.0.1:0")

    generator = numpy.random.default_rng(3)
    tensors = {f"layer.{i}.weight": generator.random((512, 1024 + i), dtype=numpy.float32) for i in range(6)}
    safetensors.numpy.save_file(tensors, memory_directory / "model.safetensors")
    fleet = Fleet(memory_directory)
    try:
        coordinator, a, b = [ready["metrics"] for ready in fleet.ready]
        before = {name: Scrape(address) for name, address in (("coordinator", coordinator), ("a", a), ("b", b))}
        fleet.publish(f"{MODEL}@1", memory_directory / "model.safetensors")
        fleet.run("pull", MODEL, "--store", fleet.store("b"), "--transport", "tcp")
        fleet.run("pull", "not-there@1", "--store", fleet.store("b"), code=3)
        with rekindle.attach(MODEL, agent=fleet.store("a"), instance="evil.in-stance") as session:
            assert sum(tensor.nbytes for _, tensor in session) > 0
            session.commit()
            serving = Scrape(a)
        eventually(lambda: Scrape(b).sum("rekindle_pulls_total") == 2)
        after = {name: Scrape(address) for name, address in (("coordinator", coordinator), ("a", a), ("b", b))}
        shared = whole_tensors()
        publish_all(fleet, "evil.joint@1", shared)
        publish_all(fleet, "evil.joint@2", [shared, shared, shared, shared | {"norm": shared["norm"].astype("f8")}])
        ends = lambda address: Scrape(address).sum("rekindle_joint_publications_total")
        eventually(lambda: ends(a) == ends(b) == 2)
        joint = {"a": Scrape(a), "b": Scrape(b)}
        yield sum(tensor.nbytes for tensor in tensors.values()), before, after, serving, joint
    finally:
        fleet.close()


def test_page_lists_exactly_what_is_exported(scraped):
    _, _, after, *_ = scraped
    exported = {}
    for scrape in after.values():
        for name, labels in scrape.labels().items():
            exported.setdefault(name, (scrape.types[name], set()))[1].update(labels)
    assert exported == page()


def test_bytes_agree_with_the_model(scraped):
    payload, before, after, *_ = scraped
    assert after["a"]("rekindle_published_bytes_total") == payload
    assert after["a"]("rekindle_publishes_total", result="ok") == 1
    tcp = {"transport": "tcp", "rail": "", "memory": "host"}
    assert after["b"]("rekindle_pull_moved_bytes_total", **tcp) == payload
    assert after["b"].sum("rekindle_pull_moved_bytes_total") == payload
    assert after["a"]("rekindle_served_bytes_total", transport="tcp") == payload
    assert before["b"].sum("rekindle_pull_moved_bytes_total") == 0
    assert after["b"]("rekindle_copies_bytes", state="verified") == payload
    assert after["b"]("rekindle_pulls_started_total") == after["b"].sum("rekindle_pulls_total") == 2
    assert after["b"]("rekindle_pulls_total", result="ok") == 1
    assert after["b"]("rekindle_pull_seconds_count") == 1
    assert after["coordinator"]("rekindle_fleet_held_bytes") == 2 * payload


def test_a_rail_moves_for_no_longer_than_the_transfer(scraped):
    _, before, after, *_ = scraped
    moving = after["b"]("rekindle_pull_moving_seconds_total", transport="tcp", rail="", memory="host")
    assert before["b"].sum("rekindle_pull_moving_seconds_total") == 0
    assert 0 < moving == after["b"].sum("rekindle_pull_moving_seconds_total")
    assert moving <= after["b"]("rekindle_pull_phase_seconds_sum", phase="transfer")


def bytes_of(tensors, shards):
    """The bytes of the elements that some of these ranks have."""
    total = 0
    for name, tensor in tensors.items():
        has = numpy.zeros(tensor.shape, bool)
        for shard in shards:
            for of, box in shard.boxes:
                if of == name:
                    has[box] = True
        total += int(has.sum()) * tensor.itemsize
    return total


def test_joint_publications_are_counted_at_each_host(scraped):
    _, _, after, _, joint = scraped
    file = len(b'{"model_type": "test"}')  # of rank 0
    for name, shards, files in (("a", SHARDS[:2], file), ("b", SHARDS[2:], 0)):
        assert after[name].sum("rekindle_joint_publications_total") == 0
        counted = joint[name]
        assert counted("rekindle_joint_publications_total", result="ok") == 1
        assert counted("rekindle_joint_publications_total", result="invalid") == 1
        assert counted("rekindle_joint_ranks_total") == 2
        assert counted("rekindle_joint_published_bytes_total") == bytes_of(whole_tensors(), shards) + files
        for phase in ("gather", "plan", "write", "digest", "finish", "claim", "commit", "confirm"):
            assert counted("rekindle_joint_phase_seconds_count", phase=phase) == 1
            assert counted("rekindle_joint_phase_seconds_sum", phase=phase) > 0
        assert "evil" not in counted.text


def test_phases_of_a_pull_are_its_time(scraped):
    _, _, after, *_ = scraped
    phases = after["b"].sum("rekindle_pull_phase_seconds_sum")
    # The total is in whole milliseconds.
    assert abs(phases - after["b"]("rekindle_pull_seconds_sum")) <= 0.002


def test_workers_and_members_are_counted(scraped):
    _, _, after, serving, _ = scraped
    assert serving("rekindle_worker_sessions", state="committed") == 1
    assert serving("rekindle_instances", state="committed") == 1
    assert after["a"]("rekindle_worker_events_total", kind="committed") == 1
    assert after["a"]("rekindle_worker_events_total", kind="other") == 0
    assert after["a"]("rekindle_attach_phase_seconds_count", phase="install") == 1
    assert after["coordinator"]("rekindle_members", state="alive") == 2
    assert after["coordinator"]("rekindle_versions", state="ready") == 1
    assert after["coordinator"]("rekindle_coordinator_leading") == 1
    assert after["coordinator"]("rekindle_rpc_seconds_count", method="coordinator_publish") == 1


def test_counters_only_grow(scraped):
    _, before, after, *_ = scraped
    for daemon, scrape in before.items():
        assert list(scrape.counts())
        for key, value in scrape.counts():
            assert after[daemon].samples[key] >= value, key


def test_names_of_users_are_no_labels_and_series_are_bounded(scraped):
    _, _, after, serving, _ = scraped
    for scrape in (*after.values(), serving):
        for name in ("evil", "not-there", 'b"'):
            assert name not in scrape.text
        assert len(scrape.samples) < 1000


def test_only_one_target_is_there(scraped):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{scraped[-1]['a'].address}/", timeout=20)


def promtool(*arguments, **more):
    """Debian's package prometheus has it. `tools/test --lane python` takes it from there and sets PROMTOOL."""
    tool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool: its checks have not run")
    checked = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=60, **more)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_finds_nothing_wrong(scraped):
    _, _, after, *_ = scraped
    for scrape in after.values():
        promtool("check", "metrics", input=scrape.text)


def expressions():
    """(where, expression) of each panel and each alert."""
    board = json.loads((ROOT / "tools/deploy/grafana/rekindle.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    rules = (ROOT / "tools/deploy/prometheus/alerts.yml").read_text()
    for block in rules.split("- alert: ")[1:]:
        yield block.splitlines()[0], block[block.index("expr:"):block.index("labels:")]


def test_dashboard_and_alerts_name_metrics_and_labels_that_are_exported(scraped):
    known = page()
    seen = list(expressions())
    assert len(seen) > 30
    for where, expression in seen:
        names = re.findall(r"rekindle_\w+", expression)
        assert names, where
        for name in names:
            base = name if name in known else re.sub(r"_(bucket|count|sum)$", "", name)
            assert base in known, f"{where}: {name}"
        labels = set(re.findall(r'(\w+)(?:=~|!=|=)"', expression))
        labels |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        allowed = {"instance", "le"}.union(*(known[n][1] for n in known if n in expression))
        assert labels <= allowed, f"{where}: {labels - allowed}"


def test_alert_rules_are_valid():
    promtool("check", "rules", ROOT / "tools/deploy/prometheus/alerts.yml")
