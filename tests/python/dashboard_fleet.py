"""A fleet that a real Prometheus scrapes while much happens to it, and what the panels of the dashboard show of that."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import numpy
import pytest
import safetensors.numpy
from conftest import BINARY, PATIENCE_S, ROOT, Rekindle, eventually, free_port
from test_joint import publish_all, whole_tensors
from test_staging import options, serving
from test_staging import weights as staged_weights
from test_update import Worker, weights

import rekindle
import rekindle.torch

DASHBOARD = ROOT / "tools/deploy/grafana/rekindle.json"
SCRAPES_EVERY_S = 0.5
# As Grafana computes it for a step of one scrape.
RATE_INTERVAL = f"{int(4000 * SCRAPES_EVERY_S)}ms"
SETTLED_S = 6 * SCRAPES_EVERY_S


class Panel:
    """A panel of the dashboard's JSON, and what Prometheus answered to its expressions."""

    def __init__(self, described):
        self.title, self.kind = described["title"], described["type"]
        self.place = described["gridPos"]
        self.unit = described.get("fieldConfig", {}).get("defaults", {}).get("unit", "none")
        self.targets = described.get("targets", [])
        # By expression: (legend, [(seconds, value)]).
        self.series = {target["expr"]: [] for target in self.targets}

    def ask(self, prometheus, begin, end):
        for target in self.targets:
            expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            for found in prometheus.range(expression, begin, end):
                labels = found["metric"]
                legend = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda label: labels.get(label[1], ""), target["legendFormat"])
                points = [(at, float(value)) for at, value in found["values"] if value not in ("NaN", "+Inf", "-Inf")]
                if points:
                    self.series[target["expr"]].append((legend.strip(), points))

    def highest(self):
        return max((value for series in self.series.values() for _, points in series for _, value in points), default=0)


def panels():
    return [Panel(described) for described in json.loads(DASHBOARD.read_text())["panels"]]


class Prometheus:
    """Scrapes the targets that it has been told of, or those of `scrape_configs`. Debian's package has the program, and
    tools/install-deps --python takes it from there."""

    def __init__(self, directory, scrape_configs=None):
        program = os.environ.get("PROMETHEUS") or shutil.which("prometheus") or str(ROOT / "build/prometheus")
        if not os.access(program, os.X_OK):
            pytest.skip("no Prometheus: the dashboard's expressions have not run")
        self.targets_file = directory / "targets.json"
        self.targets = {}
        self._write()
        rules = ROOT / "tools/deploy/prometheus/alerts.yml"
        (directory / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {int(1000 * SCRAPES_EVERY_S)}ms, evaluation_interval: 1s}}\n"
            f"rule_files: ['{rules}']\n" + (scrape_configs or
            f"scrape_configs: [{{job_name: rekindle, file_sd_configs: [{{files: ['{self.targets_file}']}}]}}]\n"))
        self.address = f"127.0.0.1:{free_port()}"
        self.log = open(directory / "prometheus.log", "wb")
        self.process = subprocess.Popen(
            [program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/prometheus",
             f"--web.listen-address={self.address}", "--log.level=warn"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        eventually(self._is_ready)

    def _is_ready(self):
        assert self.process.poll() is None, pathlib.Path(self.log.name).read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=PATIENCE_S):
                return True
        except OSError:
            return False

    def _write(self):
        text = json.dumps([{"targets": [address], "labels": {"instance": name}}
                           for name, address in self.targets.items()])
        new = self.targets_file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.targets_file)

    def scrape(self, name, address):
        """From now on, instead of the daemon that had this name before."""
        self.targets[name] = address
        self._write()

    def _ask(self, path, **parameters):
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{query}", timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]["result"]

    def range(self, expression, begin, end):
        return self._ask("query_range", query=expression, start=begin, end=end, step=SCRAPES_EVERY_S)

    def value(self, expression):
        """The sum of the newest values; 0 if there is none."""
        return sum(float(found["value"][1]) for found in self._ask("query", query=expression))

    def close(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


class WatchedFleet(Rekindle):
    """Agents a, b and c, which send 40 MB/s to each puller."""

    def __init__(self, directory):
        self.began = time.time()
        self.prometheus = Prometheus(directory)
        super().__init__(directory)
        self.start_agent("c")

    def _daemon(self, role, *arguments):
        more = ("--max-rate", "40MB", "--scrub", "2s") if role == "agent" else ()
        started = super()._daemon(role, *arguments, "--metrics", "127.0.0.1:0", *more)
        name = f"host-{arguments[arguments.index('--node-id') + 1]}" if role == "agent" else role
        self.prometheus.scrape(name, self.ready[-1]["metrics"])
        return started

    def sees(self, expression):
        """Until Prometheus has scraped it."""
        eventually(lambda: self.prometheus.value(expression) > 0)

    def pull(self, version, name, *more, code=0):
        return self.run("pull", version, "--store", self.store(name), *more, code=code)

    def close(self):
        super().close()
        self.prometheus.close()


def publications(fleet, checkpoint):
    """Of a file, of several ranks, and one that is refused: the version has other bytes."""
    fleet.publish("qwen3@41", checkpoint)
    fleet.sees('rekindle_rpc_seconds_count{method="coordinator_publish"}')
    other = fleet.directory / "other.safetensors"
    safetensors.numpy.save_file({"w": numpy.zeros(8, numpy.uint8)}, other)
    fleet.run("publish", "qwen3@41", other, "--store", fleet.store("b"), code=7)
    publish_all(fleet, "parts@1", whole_tensors())


def pulls(fleet):
    """One over shared memory, one that fails, and one over TCP that loses a source."""
    fleet.pull("qwen3@41", "b", "--transport", "shm")
    fleet.pull("not-there@1", "b", code=3)
    puller = threading.Thread(target=fleet.pull, args=("qwen3@41", "c", "--transport", "tcp"))
    moved = 'rekindle_pull_moved_bytes_total{instance="host-c"}'
    puller.start()
    eventually(lambda: fleet.prometheus.value(moved) > 16 << 20)
    fleet.kill_agent("b")
    puller.join(PATIENCE_S)
    assert not puller.is_alive()
    fleet.start_agent("b")


def recovery(fleet):
    """A worker that is killed and started again."""
    worker = pathlib.Path(BINARY).parent / "example_worker"
    supervisor = subprocess.Popen(
        [BINARY, "run", "--model", "qwen3@41", "--instance", "chat", "--store", fleet.store("a"), "--", worker],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=fleet.environment)
    try:
        committed = 'rekindle_worker_sessions{state="committed"}'
        fleet.sees(committed)
        children = pathlib.Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        # The end of its connection may be seen first.
        fleet.sees('rekindle_worker_events_total{kind=~"died|failed"}')
        fleet.sees(committed)
    finally:
        supervisor.terminate()
        supervisor.wait(PATIENCE_S)


def update(fleet):
    """Of two workers on doubles of a GPU together, and of one that takes the version beside the one that serves."""
    store = fleet.store("a")
    for version in (1, 2):
        rekindle.publish(weights(version), f"m@{version}", agent=store)
        rekindle.publish(staged_weights(version), f"staged@{version}", agent=store)
    workers = [Worker(rank, store) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert worker.serves.wait(PATIENCE_S) and worker.failed is None
    rekindle.update("m@2", group="actors", gather=PATIENCE_S, timeout=PATIENCE_S, agent=store)
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive() and worker.failed is None, worker.failed
    model, first = serving(store)
    with rekindle.torch.stage(model, "staged", 2, staging="require", reserve_bytes=0,
                              **options(store, generation=1)) as staged:
        assert staged.wait(PATIENCE_S)
        second = staged.switch()
    fleet.sees("rekindle_update_phase_seconds_count")
    fleet.sees('rekindle_instances{state="committed"}')
    for session in (first, second, *(worker.updated for worker in workers)):
        session.close()


def panels_of_an_eventful_run(directory):
    """All panels with what Prometheus knows of the run."""
    generator = numpy.random.default_rng(2)
    tensors = {f"layer.{i}.weight": generator.integers(256, size=8 << 20, dtype=numpy.uint8) for i in range(12)}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    fleet = WatchedFleet(directory)
    try:
        # An increase is seen only by those who knew the count before.
        eventually(lambda: fleet.prometheus.value("count_over_time(rekindle_build_info[1m])") >= 8)
        publications(fleet, directory / "model.safetensors")
        pulls(fleet)
        recovery(fleet)
        update(fleet)
        time.sleep(SETTLED_S)
        drawn = panels()
        for panel in drawn:
            panel.ask(fleet.prometheus, fleet.began, time.time())
        return drawn
    finally:
        fleet.close()
