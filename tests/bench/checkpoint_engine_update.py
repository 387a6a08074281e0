"""How fast `ParameterServer.update` brings a model to an engine's workers, one for each GPU.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/checkpoint_engine_update.py [--gib N] [--tensors N] [--gpus N] [--runs N]
            [--directory DIR] [--phases]

Rekindle's class, that of checkpoint-engine, and plain uploads from pinned memory take turns. A
worker has the tensors of the model on its GPU, receives by checkpoint-engine's own
`update_weights_from_ipc`, and copies each tensor. A time is that of the whole call of update(), of
the slowest rank. In half of the rounds the workers have called gc.freeze(), as engines do after
their start; in the others, checkpoint-engine's receiver collects all of their Python objects twice.

Plain uploads: with one GPU of the whole model; with more, of an equal part on each GPU at once.
The first update of each is not counted; the bytes that it brought are compared.
--phases: when the phases of Rekindle's updates ended, in ms since the call, on rank 0.
--doubles: without a GPU, and without checkpoint-engine's class and uploads; for a try.
"""
from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import pathlib
import shutil
import socket
import statistics
import sys
import tempfile
import time
import types
from typing import Any

GIB = 1 << 30
COLUMNS = 1024
SYSTEMS = ("rekindle", "checkpoint-engine", "uploads")
PATIENCE_S = 120


def shapes_of(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    rows = max(1, int(options.gib * GIB) // options.tensors // COLUMNS // 2)
    return {f"model.layers.{index}.weight": (rows, COLUMNS) for index in range(options.tensors)}


def checksum(tensor: Any) -> int:
    """Of the bytes and their order."""
    import torch
    values = tensor.reshape(-1).view(torch.int16).to(torch.int64)
    weights = torch.arange(values.numel(), device=values.device) % 8191 + 1
    return int((values * weights).sum())


def die_with_parent() -> None:
    import ctypes
    import signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def worker(pipe: Any, options: argparse.Namespace, rank: int) -> None:
    """An engine's worker. Takes addresses, "freeze", "unfreeze" and "check" from the pipe."""
    die_with_parent()
    import torch
    import zmq
    from checkpoint_engine import worker as theirs
    device = "cpu" if options.doubles else f"cuda:{rank}"
    if options.doubles:
        nothing = types.SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None,
                                        empty_cache=lambda: None)
        theirs.DeviceManager = lambda: types.SimpleNamespace(device_module=nothing)
    else:
        torch.cuda.set_device(rank)
    model = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
             for name, shape in shapes_of(options).items()}

    def load(weights: Any) -> None:
        for name, tensor in weights:
            model[name].copy_(tensor)

    context = zmq.Context()
    pipe.send("ready")
    while True:
        order = pipe.recv()
        if order == "freeze":
            gc.freeze()
        elif order == "unfreeze":
            gc.unfreeze()
        elif order == "check":
            pipe.send({name: checksum(tensor) for name, tensor in model.items()})
            for tensor in model.values():
                tensor.zero_()
        else:
            theirs.update_weights_from_ipc(context, order, rank, run=load)
            pipe.send("updated")


def rank_of(system: str, pipe: Any, to_worker: Any, options: argparse.Namespace, rank: int,
            port: int, store: str) -> None:
    """A process with one rank of a ParameterServer, or with plain uploads. Answers each "update"
    with its seconds and phases, and "sums" with the checksums of its part."""
    die_with_parent()
    import torch
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.gpus), "MASTER_ADDR": "127.0.0.1"}
    device = "cpu" if options.doubles else f"cuda:{rank}"
    if not options.doubles:
        torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    names = list(shapes_of(options).items())[rank::options.gpus]
    phases: list[tuple[str, float]] = []
    if system == "uploads":
        update = uploads(sum(rows * columns * 2 for _, (rows, columns) in names), device)
        sums = {}
    else:
        tensors = {name: torch.randint(-30000, 30000, shape, dtype=torch.int16, device=device)
                   .view(torch.bfloat16) for name, shape in names}
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        server = make_server(system, options, port, store, rank, phases)
        server.register_checkpoint("bench", named_tensors=tensors)
        del tensors
        server.gather_metas("bench")

        def ask(handles: Any) -> None:
            to_worker.send(handles[rank][1])
            to_worker.recv()

        def update() -> None:
            server.update("bench", ask)

    pipe.send("ready")
    while True:
        if pipe.recv() == "sums":
            pipe.send(sums)
            continue
        phases.clear()
        begun = time.perf_counter()
        update()
        pipe.send((time.perf_counter() - begun,
                   [(what, (at - begun) * 1e3) for what, at in phases]))


def make_server(system: str, options: argparse.Namespace, port: int, store: str, rank: int,
                phases: list[tuple[str, float]]) -> Any:
    common = {"rank": rank, "world_size": options.gpus, "master_addr": "127.0.0.1",
              "master_port": port}
    if system == "rekindle":
        note_phases(phases)
        from rekindle.compat.checkpoint_engine import ParameterServer as Ours
        return Ours(agent=store, device=f"double:{rank}" if options.doubles else None, **common)
    # It would start a Mooncake engine for a way of updating that is not measured.
    sys.modules["mooncake"] = None  # type: ignore[assignment]
    from checkpoint_engine.ps import ParameterServer as Theirs
    from loguru import logger
    logger.remove()
    # Its class takes rank 0 for none.
    return Theirs(**{**common, "rank": rank or None})


def note_phases(phases: list[tuple[str, float]]) -> None:
    from rekindle.compat.checkpoint_engine import update
    from rekindle.compat.checkpoint_engine.channel import Channel

    def noting(owner: Any, method: str, what: str) -> None:
        inner = getattr(owner, method)

        def outer(*arguments: Any, **more: Any) -> Any:
            result = inner(*arguments, **more)
            phases.append((what, time.perf_counter()))
            return result

        setattr(owner, method, outer)

    noting(update.Source, "prepare", "attached")
    noting(update, "make_buffer", "buffer")
    noting(Channel, "wait_for_receiver", "connected")
    noting(Channel, "tell", "told")
    noting(Channel, "answer", "answered")
    noting(update.Source, "finish", "gave back")
    noting(update.Rank, "run", "rank ended")
    noting(update.Rank, "close", "closed")


def uploads(nbytes: int, device: str) -> Any:
    import torch
    chunk = min(GIB, nbytes)
    pinned = torch.ones(chunk, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(chunk, dtype=torch.uint8, device=device)

    def update() -> None:
        left = nbytes
        while left:
            size = min(left, chunk)
            target[:size].copy_(pinned[:size], non_blocking=True)
            left -= size
        torch.cuda.synchronize(device)

    return update


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Together:
    """The ranks of one system, and their workers."""

    def __init__(self, system: str, options: argparse.Namespace, store: str) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.options = options
        self.pipes, self.workers, self.processes = [], [], []
        for rank in range(options.gpus):
            to_worker = None
            if system != "uploads":
                # The rank asks its worker for updates; this process asks for the rest.
                to_worker, of_rank = context.Pipe()
                self.workers.append(to_worker)
                self._start(context, worker, (of_rank, options, rank))
                of_rank.close()  # So that the end of the worker is seen.
                answer(to_worker, "a worker")
            pipe, end = context.Pipe()
            self.pipes.append(pipe)
            self._start(context, rank_of, (system, end, to_worker, options, rank, port, store))
            end.close()
        for pipe in self.pipes:
            answer(pipe, f"a rank of {system}")

    def _start(self, context: Any, target: Any, arguments: tuple[Any, ...]) -> None:
        process = context.Process(target=target, args=arguments)
        process.start()
        self.processes.append(process)

    def update(self) -> tuple[float, list[tuple[str, float]]]:
        for pipe in self.pipes:
            pipe.send("update")
        times = [answer(pipe, "an update") for pipe in self.pipes]
        return max(seconds for seconds, _ in times), times[0][1]

    def tell_workers(self, order: str) -> None:
        for pipe in self.workers:
            pipe.send(order)

    def right(self) -> bool:
        """Whether every worker has the bytes of all ranks. Clears them."""
        if not self.workers:
            return True
        wanted: dict[str, int] = {}
        for pipe in self.pipes:
            pipe.send("sums")
            wanted |= answer(pipe, "checksums")
        self.tell_workers("check")
        return all(answer(pipe, "a worker") == wanted for pipe in self.workers)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def answer(pipe: Any, whose: str) -> Any:
    if not pipe.poll(PATIENCE_S):
        sys.exit(f"{whose} did not come in {PATIENCE_S} s")
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"{whose} did not come: its process has ended")


def report(options: argparse.Namespace, store: str) -> bool:
    systems = [name for name in SYSTEMS if name == "rekindle" or not options.doubles]
    running: dict[str, Together] = {}
    rows: dict[tuple[str, bool], list[float]] = {}
    traces: list[tuple[bool, list[tuple[str, float]]]] = []
    right = True
    try:
        for system in systems:
            running[system] = Together(system, options, store)
            running[system].update()
            right = running[system].right() and right
        for frozen in (True, False):
            for together in running.values():
                together.tell_workers("freeze" if frozen else "unfreeze")
            for _ in range(options.runs):
                for system, together in running.items():
                    seconds, phases = together.update()
                    rows.setdefault((system, frozen), []).append(seconds)
                    if system == "rekindle":
                        traces.append((frozen, phases))
    finally:
        for together in running.values():
            together.close()
    show(options, rows)
    for frozen, phases in traces if options.phases else ():
        print(f"phases, {'frozen' if frozen else 'not frozen'}: "
              + ", ".join(f"{what} {at:.1f}" for what, at in phases))
    print("  every byte is right" if right else "  BYTES ARE WRONG")
    return right


def show(options: argparse.Namespace, rows: dict[tuple[str, bool], list[float]]) -> None:
    nbytes = sum(rows * columns * 2 for rows, columns in shapes_of(options).values())
    print(f"{nbytes / GIB:.2f} GiB in {options.tensors} tensors to {options.gpus} GPUs, "
          f"{len(os.sched_getaffinity(0))} CPUs, medians of {options.runs}")
    for frozen in (True, False):
        print(f"  workers {'after' if frozen else 'without'} gc.freeze()")
        found = {system: statistics.median(rows[system, frozen]) for system in SYSTEMS
                 if (system, frozen) in rows}
        for system, seconds in found.items():
            ratios = "".join(f"  {other} / this {found[other] / seconds:.3f}"
                             for other in found if other != system)
            every = " ".join(f"{one:.3f}" for one in rows[system, frozen])
            print(f"    {system:18} {seconds:.3f} s {nbytes / seconds / 1e9:6.1f} GB/s{ratios}   "
                  f"({every})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--tensors", type=int, default=512)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--directory", default="/dev/shm", help="of the store: a tmpfs")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--doubles", action="store_true")
    options = parser.parse_args()
    from bench_fleet import Fleet
    directory = pathlib.Path(tempfile.mkdtemp(prefix="checkpoint-engine.", dir=options.directory))
    fleet = None
    try:
        fleet = Fleet(directory, "double" if options.doubles else "cuda", options.gpus)
        if not report(options, str(fleet.store)):
            sys.exit(1)
    finally:
        if fleet is not None:
            fleet.close()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
