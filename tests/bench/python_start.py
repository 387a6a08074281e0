"""How soon a Python worker copies its first bytes: the package's import, and the attach.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/python_start.py [--tensors N] [--device double:0|cuda:0|cpu] [--runs N]
            [--directory DIR]

Prints medians of wall time and of CPU time. The import is measured in new processes, beside the
interpreter's own start. Then, each in a new process, as a worker that comes back: the load of
librekindle, `attach`, and the list of the tensors, or on the host the first tensor. The same in one
process that attaches repeatedly. With a device and 2048 tensors or more, `load_into` begins to copy
when `attach` has returned, while it reads the list. CPU time is of all threads of the worker; the
agent's is beside it. The limit, in the same run: a plain loop that makes as many pointers. Needs no
GPU, and torch or numpy only for `--device cpu`.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench_fleet import Fleet

import rekindle

# Bytes of a tensor. An attach takes as long for larger ones.
ROW = 1024
STARTS = {
    "the interpreter": "pass",
    "import rekindle": "import rekindle",
    "import rekindle, and what attach needs": "import rekindle; rekindle.attach",
}


class Sample(NamedTuple):
    wall: float  # seconds, as the others
    cpu: float
    agent: float


Samples = dict[str, list[Sample]]


def add(samples: Samples, run: dict[str, Sample]) -> None:
    for label, sample in run.items():
        samples.setdefault(label, []).append(sample)


def report(title: str, samples: Samples) -> None:
    print(f"  {title:50}{'wall':>9}{'least':>9}{'CPU':>9}{'agent':>9}")
    for label, runs in samples.items():
        wall, cpu, agent = (statistics.median(column) * 1e3 for column in zip(*runs))
        least = min(sample.wall for sample in runs) * 1e3
        print(f"    {label:48}{wall:9.2f}{least:9.2f}{cpu:9.2f}{agent:9.2f}")


def cpu_of(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def start(code: str) -> Sample:
    before, begun = cpu_of(resource.getrusage(resource.RUSAGE_CHILDREN)), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    took = time.perf_counter() - begun
    return Sample(took, cpu_of(resource.getrusage(resource.RUSAGE_CHILDREN)) - before, 0.0)


def write_model(directory: pathlib.Path, count: int) -> None:
    """Writes one safetensors file of `count` tensors, whose bytes are a hole."""
    header = {f"model.layers.{i // 512}.mlp.experts.{i % 512}.down_proj.weight": {
        "dtype": "BF16", "shape": [16, ROW // 32], "data_offsets": [i * ROW, (i + 1) * ROW]}
        for i in range(count)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * ROW)


def cpu_of_process(pid: int) -> float:
    """Seconds of all threads of a process so far."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Worker:
    """Attaches to the model and times the steps."""

    def __init__(self, store: str, device: str, agent_pid: int) -> None:
        self.store, self.device = store, None if device == "cpu" else device
        self.agent_pid = agent_pid
        self.samples: dict[str, Sample] = {}

    def _timed(self, label: str, call: Callable[[], Any]) -> Any:
        agent, cpu, begun = cpu_of_process(self.agent_pid), time.process_time(), time.perf_counter()
        made = call()
        wall, used = time.perf_counter() - begun, time.process_time() - cpu
        busy = cpu_of_process(self.agent_pid) - agent
        self.samples[label] = Sample(wall, used, busy)
        return made

    def run(self, count: int, loads: bool) -> dict[str, Sample]:
        if loads:
            from rekindle import _abi, _optional
            rekindle.attach  # its modules
            if self.device is None:
                _optional.module("torch") or _optional.module("numpy")
            self._timed("load librekindle", _abi.load)
        session = self._timed("attach", lambda: rekindle.attach(
            "m", device=self.device, agent=self.store, timeout=60.0))
        with session:
            if self.device is None:
                self._timed("first tensor", lambda: next(session.entries())[0])
            else:
                self._timed("list of tensors", session._catalog)
                assert session.tensor_count == count
        self._timed("a loop that makes the pointers", lambda: pointers(count))
        return self.samples


def worker_process(agent: Fleet, options: argparse.Namespace) -> dict[str, Sample]:
    """Runs a Worker in a process of its own."""
    line = [sys.executable, __file__, "--tensors", str(options.tensors), "--device", options.device,
            "--worker", str(agent.store), str(agent.agent_pid)]
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE)
    return {label: Sample(*values) for label, values in json.loads(done.stdout).items()}


def pointers(count: int) -> object:
    array = (ctypes.c_void_p * count)()
    for index in range(count):
        array[index] = index * ROW
    return array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tensors", type=int, default=40_000)
    parser.add_argument("--device", default="double:0")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--directory", default="/dev/shm", help="a tmpfs")
    parser.add_argument("--worker", nargs=2, metavar=("STORE", "PID"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        store, pid = options.worker
        print(json.dumps(Worker(store, options.device, int(pid)).run(options.tensors, True)))
        return
    print(f"milliseconds, medians of {options.runs} runs (least wall time beside them)")
    starts: Samples = {}
    for run in range(options.runs + 1):
        add(starts, {label: start(code) for label, code in STARTS.items()} if run else {})
    report("a new process", starts)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="python-start.", dir=options.directory))
    try:
        (directory / "model").mkdir()
        write_model(directory / "model", options.tensors)
        agent = Fleet(directory, options.device)
        try:
            rekindle.publish(directory / "model", "m@1", agent=agent.store)
            attaches(agent, options)
        finally:
            agent.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def attaches(agent: Fleet, options: argparse.Namespace) -> None:
    new, again = Samples(), Samples()
    here = Worker(str(agent.store), options.device, agent.agent_pid)
    # Not counted: the agent describes the version at its first attach.
    here.run(options.tensors, False)
    for _ in range(options.runs):
        add(new, worker_process(agent, options))
        add(again, here.run(options.tensors, False))
    what = f"{options.tensors} tensors to {options.device}"
    report(f"{what}, a new process", new)
    report(f"{what}, again", again)


if __name__ == "__main__":
    main()
