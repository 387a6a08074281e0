"""Parameters that outlive their worker are scrubbed and mended on a GPU, and what the scrub costs a busy engine.

    python -m pytest -s tests/python/gpu/test_resident_scrub_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set. REKINDLE_TEST_DEVICES=double runs the first
test on a double. REKINDLE_TEST_RESIDENT_GIB is the size of the model of the second one, 32 by default. It prints the
steps of a loop of matrix products with and without a scrub, in turns; less than 1 % more time is wanted.
"""
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import PATIENCE_S, Rekindle, eventually

import rekindle as rk

DOUBLE = os.environ.get("REKINDLE_TEST_DEVICES") == "double"
DEVICE = "double:0" if DOUBLE else "cuda:0"
GIB = 1 << 30
ROUNDS = 5
BUSY_S = 20
HERE = pathlib.Path(__file__).parent


class Fleet(Rekindle):
    """Its agents read their settings from a file, which scrub() changes."""

    def __init__(self, directory, gpu):
        self.file = directory / "rekindle.toml"
        self._write("off")
        super().__init__(directory, gpu)

    def _daemon(self, role, *arguments):
        more = ("--config", self.file) if role == "agent" else ()
        return super()._daemon(role, *arguments, *more)

    def _write(self, every):
        self.file.write_text(f'[agent]\nresident-scrub = "{every}"\n')

    def scrub(self, every):
        self._write(every)
        logs = list(self.directory.glob("agent-*.log"))
        before = [log.read_text().count("config.reloaded") for log in logs]
        for process in self.agents.values():
            process.send_signal(signal.SIGHUP)
        assert eventually(lambda: all(log.read_text().count("config.reloaded") > count
                                      for log, count in zip(logs, before, strict=True)))


@pytest.fixture
def fleet(memory_directory, request):
    if not DOUBLE and not torch.cuda.is_available():
        assert not os.environ.get("REKINDLE_REQUIRE_GPU"), "there is no GPU"
        pytest.skip("no GPU: the scrub of resident weights has not run on CUDA")
    directory = memory_directory / f"{abs(hash(request.node.name)):x}"
    directory.mkdir()
    running = Fleet(directory, "double:1" if DOUBLE else "auto")
    yield running
    running.close()


class Process:
    def __init__(self, script, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=PATIENCE_S)[1]
        return json.loads(line)

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


def events(fleet, kind):
    printed = subprocess.run([fleet.command[0], "events", "--store", fleet.store("a"), "--json"], check=True,
                             capture_output=True, text=True, timeout=PATIENCE_S).stdout
    return [event["why"] for event in map(json.loads, printed.splitlines()) if event["event"] == kind]


def test_a_changed_byte_is_mended_between_two_steps(fleet):
    shapes = {"first.weight": (700, 300), "first.bias": (700,), "second.weight": (300, 700),
              "norm.weight": (300,), "norm.bias": (300,), "scale": (5,)}
    rk.publish({name: torch.randn(shape) for name, shape in shapes.items()}, "m@1", agent=fleet.store("a"))
    worker = Process(HERE.parent / "resident_process.py", fleet.store("a"), "m", DEVICE, "{}")
    worker.tell("watch")
    # The worker's own write, behind the agent's back.
    assert worker.tell("scribble")["sum"] != worker.ready["sum"]
    fleet.scrub("1s")
    assert "second.weight" in worker.tell("step")["tensors"]
    assert worker.tell("watch")["sum"] == worker.ready["sum"]
    assert len(events(fleet, "resident_mended")) == 1
    # A copy without a worker.
    worker.tell("scribble")
    worker.kill()
    assert eventually(lambda: len(events(fleet, "resident_mended")) == 2)
    successor = Process(HERE.parent / "resident_process.py", fleet.store("a"), "m", DEVICE, "{}")
    assert successor.ready["rung"] == "resident" and successor.ready["sum"] == worker.ready["sum"]
    successor.kill()


@pytest.mark.skipif(DOUBLE, reason="a double has no kernels to slow down")
def test_what_the_scrub_costs_a_busy_engine(fleet, capsys):
    """Turns the scrub on and off by the agent's configuration, through SIGHUP."""
    gib = float(os.environ.get("REKINDLE_TEST_RESIDENT_GIB", "32"))
    layers = 32
    layer = torch.zeros(int(gib * GIB) // layers // 4)
    rk.publish({f"layers.{i}": layer for i in range(layers)}, "busy@1", agent=fleet.store("a"))
    worker = Process(HERE / "resident_busy_worker.py", fleet.store("a"), DEVICE, layers, layer.numel())
    on, off = [], []
    for _ in range(ROUNDS):
        for every, times in (("60s", on), ("off", off)):
            fleet.scrub(every)
            times.append(worker.tell(f"work {BUSY_S}"))
    worker.kill()
    fast = statistics.median(one["median_s"] for one in off)
    with capsys.disabled():
        for name, times in (("scrub 60s", on), ("scrub off", off)):
            print(f"\n{name}: median step {statistics.median(one['median_s'] for one in times) * 1e3:.3f} ms, "
                  f"mean {statistics.mean(one['mean_s'] for one in times) * 1e3:.3f} ms, "
                  f"longest {max(one['longest_s'] for one in times) * 1e3:.3f} ms", end="")
        mean = [statistics.median(one["mean_s"] for one in times) for times in (on, off)]
        print(f"\nratio of the medians of the means {mean[0] / mean[1]:.4f}, of the medians "
              f"{statistics.median(one['median_s'] for one in on) / fast:.4f}")
    assert not events(fleet, "resident_damaged")
