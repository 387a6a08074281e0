"""How fast several processes publish one version together, beside parallel copies.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/python_joint_publish.py [--processes N] [--mib N] [--rounds N]
            [--directory DIR]

Each process has its share of the tensors in its own memory. In turn, all of them copy it at once
into files that are there (memcpy), and publish it together into the agent's pool, through an agent
without a coordinator. Before that, `rekindle bench store` measures copies whose bytes are digested,
too: the agent must read every byte once more, so that is the limit of a publication. Prints medians
of the rounds.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection

import numpy

import rekindle

MIB = 1 << 20
TENSORS = 8  # of each process
PATIENCE_S = 300.0


class Rank:
    """One process. It obeys until its parent closes the pipe."""

    def __init__(self, rank: int, options: argparse.Namespace, directory: pathlib.Path,
                 orders: Connection) -> None:
        self.rank, self.world = rank, options.processes
        self.store = directory / "store"
        size = options.mib * MIB // options.processes // TENSORS
        random = numpy.random.default_rng(rank)
        self.tensors = [random.integers(0, 256, size, dtype=numpy.uint8) for _ in range(TENSORS)]
        with open(directory / f"copy{rank}", "w+b") as file:
            file.truncate(size * TENSORS)
            self.target = mmap.mmap(file.fileno(), size * TENSORS)
        self.copy()  # Allocates the pages.
        orders.send(None)
        while True:
            try:
                version = orders.recv()
            except EOFError:
                return
            if version is None:
                self.copy()
            else:
                self.publish(version)
            orders.send(None)

    def copy(self) -> None:
        memory = ctypes.c_char.from_buffer(self.target)
        address = ctypes.addressof(memory)
        for tensor in self.tensors:
            ctypes.memmove(address, tensor.ctypes.data, tensor.nbytes)
            address += tensor.nbytes

    def publish(self, version: int) -> None:
        with rekindle.publisher(f"m@{version}", rank=self.rank, world=self.world,
                                agent=self.store) as publisher:
            for index, tensor in enumerate(self.tensors):
                publisher.add(f"rank{self.rank}.{index}", tensor)
            publisher.commit(timeout=PATIENCE_S)


def in_all(ranks: list[Connection], order: int | None) -> float:
    begun = time.perf_counter()
    for rank in ranks:
        rank.send(order)
    for rank in ranks:
        rank.recv()
    return time.perf_counter() - begun


def copy_and_digest(directory: pathlib.Path, mib: int) -> tuple[float, float]:
    """Seconds of parallel copies, and of copies with digests."""
    said = subprocess.run(
        [os.environ["REKINDLE_BINARY"], "bench", "store", "--bytes", f"{max(mib, 512)}M", "--json", "--store",
         directory / "bench"], check=True, stdout=subprocess.PIPE, timeout=PATIENCE_S).stdout
    found = {row["name"]: row["ms"] / 1e3 for row in json.loads(said)["rows"]}
    return found["copy"], found["copy and digest"]


def check(store: pathlib.Path, version: int, processes: int) -> None:
    with rekindle.attach("m", version, agent=store, timeout=PATIENCE_S) as session:
        found = dict(session)
    assert len(found) == processes * TENSORS
    for rank in range(processes):
        random = numpy.random.default_rng(rank)
        for index in range(TENSORS):
            one = found[f"rank{rank}.{index}"]
            known = random.integers(0, 256, one.shape[0], dtype=numpy.uint8)
            assert numpy.array_equal(one.numpy(force=True), known), (rank, index)


def measure(options: argparse.Namespace, directory: pathlib.Path) -> None:
    copy_s, digest_s = copy_and_digest(directory, options.mib)
    with open(directory / "agent.log", "wb") as log:
        agent = subprocess.Popen(
            [os.environ["REKINDLE_BINARY"], "agent", "--json", "--listen", "127.0.0.1:0", "--gpu",
             "none", "--store", directory / "store"], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log)
    context = multiprocessing.get_context("spawn")
    processes, ranks = [], []
    try:
        assert agent.stdout is not None
        if not agent.stdout.readline():
            sys.exit("the agent ended: " + (directory / "agent.log").read_text())
        for rank in range(options.processes):
            here, there = context.Pipe()
            processes.append(context.Process(target=Rank, args=(rank, options, directory, there)))
            processes[-1].start()
            there.close()
            ranks.append(here)
        for one in ranks:
            one.recv()
        copies, published = [], []
        for version in range(1, options.rounds + 2):
            copied = in_all(ranks, None)
            done = in_all(ranks, version)
            if version == 1:
                continue  # Into fresh memory.
            copies.append(copied)
            published.append(done)
            if version == options.rounds + 1:
                check(directory / "store", version, options.processes)
            rekindle.command.run("retire", f"m@{version}", "--store", directory / "store",
                                 timeout=PATIENCE_S)
            if version == 2:
                rekindle.command.run("retire", "m@1", "--store", directory / "store",
                                     timeout=PATIENCE_S)
    finally:
        for one in ranks:
            one.close()
        for process in processes:
            process.join(PATIENCE_S)
        agent.terminate()
        agent.wait(PATIENCE_S)
    copied, done = statistics.median(copies), statistics.median(published)
    limit = copied * digest_s / copy_s
    print(f"{options.mib} MiB from {options.processes} processes, "
          f"{len(os.sched_getaffinity(0))} CPUs, medians of {options.rounds} rounds")
    print(f"  memcpy of all processes       {copied:8.3f} s")
    print(f"  copy and digest (the limit)   {limit:8.3f} s   {digest_s / copy_s:.2f} of a copy in "
          "`rekindle bench store`")
    print(f"  joint publication, warm pool  {done:8.3f} s   {copied / done:.2f} of memcpy, "
          f"{limit / done:.2f} of copy and digest   all: "
          + " ".join(f"{one:.3f}" for one in published))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--mib", type=int, default=1024, help="of all processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default="/dev/shm", help="of the store: a tmpfs")
    options = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="python-joint.", dir=options.directory))
    try:
        measure(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
