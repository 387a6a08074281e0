"""How fast Python publishes a model from a GPU, beside plain copies into pinned memory.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/python_publish.py [--gib N] [--tensors N] [--device cuda:0] [--runs N]
            [--directory DIR] [--copies-only]

Each round copies the model to pinned memory, publishes it into fresh memory and into the pool, and
runs kernels on the trainer's stream without and with a publication beside them. Prints medians of
the rounds: the whole call of `rekindle.publish`, and its parts (begin, in which the agent allocates
memory; copy; commit, in which it digests). Then how much later the kernels ended, and whether every
byte is right.

The pool holds a quarter of the store's budget, so DIR needs room for 4.5 times the model.
--copies-only: into files that are made here, without an agent. So nothing is digested, and
REKINDLE_BINARY is not needed.
"""
from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import rekindle
from rekindle import publication
from rekindle._host_copies import HostCopies

GIB = 1 << 30
PATIENCE_S = 600.0
SEGMENT = 5 * GIB  # at most, as in a store
KERNELS = 1000  # on the trainer's stream
POPULATE_WRITE = 23  # of madvise


class Files:
    """What `rekindle.publish` writes to with --copies-only: as a Publication, without an agent."""

    directory = pathlib.Path()
    open_copies = None  # Its places are memory like any other.

    def __init__(self, model_version: str, announced: Sequence[Any], agent: object,
                 timeout: float) -> None:
        sizes = [_bytes(one) for one in announced]
        self._places: list[tuple[int, int, int]] = []  # file, offset, bytes
        ends = [0]
        for size in sizes:
            if ends[-1] + size > SEGMENT and ends[-1]:
                ends.append(0)
            self._places.append((len(ends) - 1, ends[-1], size))
            ends[-1] += size
        self._maps = [self._map(number, size) for number, size in enumerate(ends)]

    def _map(self, number: int, size: int) -> mmap.mmap:
        path = self.directory / str(number)
        fresh = not path.exists()
        with open(path, "a+b") as file:
            file.truncate(size)
            if fresh:
                _allocate(file.fileno(), size)
            return mmap.mmap(file.fileno(), size)

    def place(self, index: int) -> "ctypes.Array[ctypes.c_char]":
        number, offset, size = self._places[index]
        return (ctypes.c_char * size).from_buffer(self._maps[number], offset)

    def commit(self, timeout: float | None) -> None:
        pass

    def end(self) -> None:
        self._maps.clear()  # Unmapped with the last place.


def _bytes(announced: Any) -> int:
    count = rekindle.dtypes.itemsize(announced.dtype)
    for extent in announced.shape:
        count *= extent
    return count


def _allocate(descriptor: int, size: int) -> None:
    """As a store does: with several threads."""
    madvise, step = ctypes.CDLL(None).madvise, 64 << 20
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with mmap.mmap(descriptor, size) as memory, ThreadPoolExecutor(8) as pool:
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first)
        list(pool.map(lambda at: madvise(address + at, min(step, size - at), POPULATE_WRITE),
                      range(0, size, step)))
        del first


class Parts:
    """Wraps the classes of publications and copies, and times their steps."""

    def __init__(self, kind: Any) -> None:
        parts = self

        class Timed(kind):  # type: ignore[misc]
            def __init__(self, *arguments: Any) -> None:
                begun = time.perf_counter()
                super().__init__(*arguments)
                parts.begun = time.perf_counter()
                parts.begin = parts.begun - begun

            def commit(self, timeout: float | None) -> None:
                begun = time.perf_counter()
                super().commit(timeout)
                parts.commit = time.perf_counter() - begun

        class TimedCopies(HostCopies):
            def finish(self) -> None:
                super().finish()
                parts.copy = time.perf_counter() - parts.begun

        self.begun = self.begin = self.copy = self.commit = 0.0
        publication.Publication = Timed  # type: ignore[misc]
        publication.HostCopies = TimedCopies  # type: ignore[misc]


class Benchmark:
    def __init__(self, options: argparse.Namespace, directory: pathlib.Path) -> None:
        self.directory, self.copies_only = directory, options.copies_only
        self.device = torch.device(options.device)
        self.model = even_model(options.gib, options.tensors, self.device)
        self.nbytes = sum(tensor.nbytes for tensor in self.model.values())
        chunk = min(GIB, self.nbytes)
        self.pinned = torch.empty(chunk, dtype=torch.uint8, pin_memory=True)
        self.source = torch.ones(chunk, dtype=torch.uint8, device=self.device)
        self.parts = Parts(Files if self.copies_only else publication.Publication)
        self.fleet: Any = None
        self.version = 0
        self.kernels, self.keep = kernels(self.device)
        self.rows: dict[str, list[tuple[float, ...]]] = {}

    def note(self, label: str, *seconds: float) -> None:
        self.rows.setdefault(label, []).append(seconds)

    def downloads(self) -> float:
        torch.cuda.synchronize(self.device)
        begun, left = time.perf_counter(), self.nbytes
        while left:
            size = min(left, len(self.pinned))
            self.pinned[:size].copy_(self.source[:size], non_blocking=True)
            left -= size
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun

    def publish(self) -> tuple[float, ...]:
        self.version += 1
        torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        agent = None if self.copies_only else self.fleet.store
        rekindle.publish(self.model, f"m@{self.version}", agent=agent, timeout=PATIENCE_S)
        whole = time.perf_counter() - begun
        return whole, self.parts.begin, self.parts.copy, self.parts.commit

    def start(self) -> None:
        """With an empty store."""
        self.stop()
        if self.copies_only:
            Files.directory = pathlib.Path(tempfile.mkdtemp(dir=self.directory))
            return
        from bench_fleet import Fleet
        where = pathlib.Path(tempfile.mkdtemp(dir=self.directory))
        self.fleet = Fleet(where, str(self.device))

    def stop(self) -> None:
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None
        for path in self.directory.iterdir():
            shutil.rmtree(path)

    def retire(self) -> None:
        """Moves the memory of the last version into the pool."""
        if not self.copies_only:
            rekindle.command.run("retire", f"m@{self.version}", "--store", self.fleet.store,
                                 timeout=PATIENCE_S)

    def run_kernels(self, after_s: float = 0.0) -> Callable[[], float]:
        """Starts them in a thread, on the stream that publish() takes for the trainer's. Returns a
        function that waits for them, and returns their seconds on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run() -> None:
            time.sleep(after_s)
            begin.record(torch.cuda.current_stream(self.device))
            self.kernels.replay()
            end.record(torch.cuda.current_stream(self.device))

        thread = threading.Thread(target=run)
        thread.start()

        def wait() -> float:
            thread.join()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return wait

    def round(self) -> None:
        self.start()
        self.note("fresh", *self.publish())
        self.retire()
        self.note("pinned", self.downloads())
        self.note("warm", *self.publish())
        self.retire()
        alone = self.run_kernels()()
        torch.cuda.synchronize(self.device)
        # Until the copies are under way: a publication follows the work that was queued before.
        wait = self.run_kernels(after_s=0.05)
        beside = self.publish()
        self.note("kernels", alone, wait(), *beside)

    def right(self) -> bool:
        """Whether the last publication has all bytes."""
        if self.copies_only:
            files = Files("m@0", [_announced(*item) for item in self.model.items()], None, 0)
            places = map(files.place, range(len(self.model)))
            found = {name: torch.frombuffer(place, dtype=torch.int16)
                     for name, place in zip(self.model, places)}
            return self._same(found)
        with rekindle.attach("m", self.version, agent=self.fleet.store,
                             timeout=PATIENCE_S) as session:
            return self._same(dict(session))

    def _same(self, found: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(found[name].reshape(-1).view(torch.int16).to(self.device),
                               tensor.reshape(-1).view(torch.int16))
                   for name, tensor in self.model.items())

    def report(self, runs: int) -> bool:
        self.start()
        self.publish()  # Pins the ring, and starts what CUDA needs.
        for _ in range(runs):
            self.round()
        right = self.right()
        self.stop()
        medians = {label: [statistics.median(column) for column in zip(*rows)]
                   for label, rows in self.rows.items()}
        (limit,) = medians["pinned"]
        print(f"{self.nbytes / GIB:.2f} GiB in {len(self.model)} tensors from "
              f"{torch.cuda.get_device_name(self.device)}, {len(os.sched_getaffinity(0))} CPUs, "
              f"medians of {runs} rounds" + (", copies only" if self.copies_only else ""))
        print(f"  {'':24}{'s':>8}{'GB/s':>7}{'begin':>8}{'copy':>8}{'GB/s':>7}{'ratio':>7}"
              f"{'commit':>8}   copies of all rounds")
        print(f"  {'plain pinned copies':24}{limit:8.3f}{self._rate(limit):7.1f}")
        for label, name in (("fresh", "into fresh memory"), ("warm", "into the pool")):
            self._print(name, medians[label], limit, [row[2] for row in self.rows[label]])
        alone, beside, *published = medians["kernels"]
        self._print("the same beside kernels", published, limit,
                    [row[4] for row in self.rows["kernels"]])
        print(f"  {KERNELS} kernels on the trainer's stream: {alone * 1e3:.1f} ms alone, "
              f"{beside * 1e3:.1f} ms beside a publication ({beside / alone:.3f})")
        print(f"  the trainer's thread waits for publish(): {medians['warm'][0]:.3f} s")
        print("  every byte is right" if right else "  BYTES ARE WRONG")
        return right

    def _rate(self, seconds: float) -> float:
        return self.nbytes / seconds / 1e9

    def _print(self, name: str, parts: list[float], limit: float, copies: list[float]) -> None:
        whole, begin, copy, commit = parts
        print(f"  {name:24}{whole:8.3f}{self._rate(whole):7.1f}{begin:8.3f}{copy:8.3f}"
              f"{self._rate(copy):7.1f}{limit / copy:7.3f}{commit:8.3f}   "
              + " ".join(f"{one:.3f}" for one in copies))


def _announced(name: str, tensor: torch.Tensor) -> Any:
    from rekindle._publishing import Announced
    return Announced(name, rekindle.dtypes.dtype_name(tensor.dtype), tuple(tensor.shape))


def even_model(gib: float, count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of BF16 and random bytes, one as large as the other."""
    columns = 256
    rows = max(1, int(gib * GIB) // count // 2 // columns)
    return {f"model.layers.{i // 512}.experts.{i % 512}.weight":
            torch.randint(-30000, 30000, (rows, columns), dtype=torch.int16,
                          device=device).view(torch.bfloat16) for i in range(count)}


def kernels(device: torch.device) -> tuple[Any, Any]:
    """Matrix products, whose start needs no CPU in between. Also returns their memory."""
    left, right = (torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = left @ right
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            torch.mm(left, right, out=out)
    graph.replay()
    torch.cuda.synchronize(device)
    return graph, (left, right, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=512)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", default="/dev/shm", help="of the store: a tmpfs")
    parser.add_argument("--copies-only", action="store_true", help="without an agent")
    options = parser.parse_args()
    torch.cuda.set_device(torch.device(options.device))
    torch.manual_seed(1)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="python-publish.", dir=options.directory))
    try:
        if not Benchmark(options, directory).report(options.runs):
            sys.exit(1)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
