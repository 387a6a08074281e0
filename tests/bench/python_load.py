"""How fast Python has weights on a device, beside what it could use instead, in turn in one run.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/python_load.py [--gib N] [--tensors N] [--device cuda:0|double:0]
            [--runs N] [--hf] [--record N] [--directory DIR]

Prints medians: uploads of as many bytes from pinned memory, `Session.load_into`, safetensors'
load_file and .to() from page cache; with --hf, of a Llama model of that size, also transformers'
from_pretrained and ours. Then the time in Python, outside of librekindle, per tensor, and by how
much load_into is slower than the uploads; whether every byte is right. --record N: only the plan of
a loader of N tensors, two views and a copy each, into targets of their own and into slices of fused
ones: recorded, and from the cache.
"""
from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from bench_fleet import Fleet

import rekindle

GIB = 1 << 30
CHUNK = GIB  # of pinned memory: larger than caches
SHARD = 4 * GIB  # of a safetensors file
PATIENCE_S = 600.0


def wait_until_pinned(fleet: Fleet, nbytes: int) -> None:
    """What a copy costs once, when it appears."""
    deadline = time.monotonic() + PATIENCE_S
    while rekindle.status(agent=fleet.store).get("devices", {}).get("pinned_bytes", 0) < nbytes:
        if time.monotonic() > deadline:
            sys.exit("the device process did not pin the model")
        time.sleep(0.05)


class Model(NamedTuple):
    known: dict[str, torch.Tensor]  # on the device
    target: Any  # for load_into
    hf: Any  # transformers' model, or None
    directory: pathlib.Path  # of its safetensors files

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.known.values())

    def wrong(self, found: dict[str, torch.Tensor]) -> int:
        """Tensors that are not bit for bit what was published."""
        return sum(not torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
                   for name, tensor in self.known.items())


def even_model(gib: float, count: int, device: torch.device, directory: pathlib.Path) -> Model:
    """Tensors of BF16, one as large as the other."""
    from safetensors.torch import save_file
    columns = 256
    rows = max(1, int(gib * GIB) // count // 2 // columns)
    known = {f"model.layers.{i // 512}.experts.{i % 512}.weight":
             torch.randn(rows, columns, dtype=torch.bfloat16, device=device) for i in range(count)}
    names, held = list(known), max(1, SHARD // (rows * columns * 2))
    for number, at in enumerate(range(0, count, held)):
        save_file({name: known[name].cpu() for name in names[at:at + held]},
                  directory / f"model-{number:05}.safetensors")
    target = {name: torch.empty_like(tensor) for name, tensor in known.items()}
    return Model(known, target, None, directory)


def llama(gib: float, device: torch.device, directory: pathlib.Path) -> Model:
    """With random weights; as many layers as fit, of 8B's proportions where there is room."""
    import copy

    import transformers
    size, hidden = int(gib * GIB), 4096
    while hidden > 64 and _layers(size, hidden) < 2:
        hidden //= 2
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, vocab_size=8 * hidden,
        num_hidden_layers=max(1, _layers(size, hidden)), num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 128 or 1, tie_word_embeddings=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(directory)
    return Model(dict(model.state_dict()), copy.deepcopy(model), model, directory)


def _layers(size: int, hidden: int) -> int:
    layer = hidden * hidden * (2.5 + 3 * 3.5) * 2
    return int((size - 2 * 8 * hidden * hidden * 2) / layer)


class Timing(NamedTuple):
    label: str
    nbytes: int
    run: Callable[[], float]  # seconds
    result: Callable[[], dict[str, torch.Tensor]] | None  # of the last run


class Benchmark:
    def __init__(self, model: Model, name: str, fleet: Fleet, device: str) -> None:
        self.model, self.name, self.fleet, self.device = model, name, fleet, device
        self.torch_device = torch_device(device)
        self.in_python: list[float] = []  # seconds of load_into outside of C
        self.cpu: list[float] = []  # of them, those that this thread ran
        self.attaching: list[float] = []
        self.path = ""
        self.last: Any = None
        chunk = min(CHUNK, model.nbytes)
        self.pinned = torch.empty(chunk, dtype=torch.uint8, pin_memory=self.cuda)
        self.scratch = torch.empty(chunk, dtype=torch.uint8, device=self.torch_device)

    @property
    def cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def timings(self) -> list[Timing]:
        nbytes, target = self.model.nbytes, self.model.target
        state = (lambda: target) if isinstance(target, dict) else lambda: dict(target.state_dict())
        timings = [
            Timing("plain pinned uploads", nbytes, self.uploads, None),
            Timing("load_into", nbytes, self.load_into, state),
            Timing("safetensors load_file, .to()", nbytes, self.safetensors, lambda: self.last)]
        if self.model.hf is not None:
            def state_of_last() -> dict[str, torch.Tensor]:
                return dict(self.last.state_dict())
            timings += [
                Timing("transformers from_pretrained", nbytes, self.transformers, state_of_last),
                Timing("rekindle.torch from_pretrained", nbytes, self.ours, state_of_last)]
        return timings

    def timed(self, call: Callable[[], Any]) -> float:
        """Of `call` and of what it has queued; its result is `last`."""
        self.last = None
        gc.collect()
        self._synchronize()
        begun = time.perf_counter()
        self.last = call()
        self._synchronize()
        return time.perf_counter() - begun

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.torch_device)

    def uploads(self) -> float:
        def copy() -> None:
            left = self.model.nbytes
            while left:
                size = min(left, len(self.pinned))
                self.scratch[:size].copy_(self.pinned[:size], non_blocking=True)
                left -= size
        return self.timed(copy)

    def load_into(self) -> float:
        """Without attach, which has its own line."""
        begun = time.perf_counter()
        with rekindle.attach(self.name, device=self.device, agent=self.fleet.store,
                             timeout=PATIENCE_S) as session:
            self.attaching.append(time.perf_counter() - begun)
            inside = 0.0
            call = session._native.call

            def measured(*arguments: Any) -> None:
                nonlocal inside
                begun = time.perf_counter()
                try:
                    call(*arguments)
                finally:
                    if arguments[0] != "rk_prefetch":  # beside Python, in a thread of its own
                        inside += time.perf_counter() - begun

            session._native.call = measured  # type: ignore[method-assign]

            def load() -> None:
                begun = time.thread_time()
                session.load_into(self.model.target, timeout=PATIENCE_S)
                self.cpu.append(time.thread_time() - begun)

            seconds = self.timed(load)
            self.in_python.append(seconds - inside)
            self.path = session.device_path
            session.commit(timeout=PATIENCE_S)
        return seconds

    def safetensors(self) -> float:
        from safetensors.torch import load_file

        def load() -> dict[str, torch.Tensor]:
            return {name: tensor.to(self.torch_device, copy=True)
                    for path in sorted(self.model.directory.glob("*.safetensors"))
                    for name, tensor in load_file(path).items()}
        return self.timed(load)

    def transformers(self) -> float:
        kind = type(self.model.hf)
        more = {"device_map": str(self.torch_device)} if importlib.util.find_spec(
            "accelerate") else {}
        return self.timed(lambda: kind.from_pretrained(
            self.model.directory, dtype=torch.bfloat16, **more).to(self.torch_device))

    def ours(self) -> float:
        device = self.device if self.cuda else None  # a double's memory is the host's
        return self.timed(lambda: rekindle.torch.from_pretrained(
            self.name, device=device, agent=self.fleet.store, load_timeout=PATIENCE_S))

    def report(self, runs: int) -> bool:
        """Prints it all; whether every byte was right."""
        timings = self.timings()
        first = self.load_into()  # allocates, opens IPC
        self.in_python.clear()
        self.attaching.clear()
        self.cpu.clear()
        seconds: dict[str, list[float]] = {timing.label: [] for timing in timings}
        wrong: dict[str, int] = {}
        for run in range(runs):
            for timing in timings:
                if run == runs - 1 and timing.label == "load_into":
                    _spoil(self.model.target)
                seconds[timing.label].append(timing.run())
                if run == runs - 1 and timing.result is not None:
                    wrong[timing.label] = self.model.wrong(timing.result())
        medians = {label: statistics.median(taken) for label, taken in seconds.items()}
        self._print(timings, medians, wrong, first, runs)
        return not any(wrong.values())

    def _print(self, timings: list[Timing], medians: dict[str, float], wrong: dict[str, int],
               first: float, runs: int) -> None:
        count, limit = len(self.model.known), medians["plain pinned uploads"]
        print(f"{self.model.nbytes / GIB:.2f} GiB in {count} tensors to {self.device}, medians of "
              f"{runs} runs, path {self.path}")
        print(f"  {'':32}{'s':>9}{'GB/s':>8}{'ratio':>8}  wrong tensors")
        for timing in timings:
            taken = medians[timing.label]
            print(f"  {timing.label:32}{taken:9.3f}{timing.nbytes / taken / 1e9:8.1f}"
                  f"{limit / taken:8.3f}  {wrong.get(timing.label, '')}")
        load, python = medians["load_into"], statistics.median(self.in_python)
        micro = 1e6 / count
        print(f"  load_into: attach {statistics.median(self.attaching) * 1e3:.1f} ms before it, "
              f"the first time {first:.3f} s")
        cpu = statistics.median(self.cpu)
        print(f"  Python outside of C: {python * 1e3:.1f} ms, {python * micro:.2f} us a tensor "
              f"({cpu * micro:.2f} us of CPU)")
        print(f"  slower than the uploads, that is, not hidden: {(load - limit) * 1e3:.1f} ms, "
              f"{(load - limit) * micro:.2f} us a tensor")


def _spoil(target: Any) -> None:
    """So that right bytes are those of the last load."""
    values = target.values() if isinstance(target, dict) else target.state_dict().values()
    for tensor in values:
        tensor.zero_()


def torch_device(device: str) -> torch.device:
    return torch.device("cpu" if device.startswith("double:") else device)


class Recorded(NamedTuple):
    """What --record records: a loader that writes to `places`, by the catalog's names."""
    label: str
    places: dict[str, torch.Tensor]
    targets: dict[str, torch.Tensor]


def recorded(count: int) -> Iterator[Recorded]:
    """The same plan, of as many targets; of slices of a few fused ones; of slices that are the
    targets.
    """
    names = [f"model.layers.{i // 512}.experts.{i % 512}.weight" for i in range(count)]
    apart = {name: torch.empty(16, 32, dtype=torch.bfloat16) for name in names}
    yield Recorded("a target each", apart, apart)
    fused = {f"model.layers.{layer}.experts": torch.empty(512, 16, 32, dtype=torch.bfloat16)
             for layer in range(-(-count // 512))}
    slices = {name: fused[f"model.layers.{i // 512}.experts"][i % 512]
              for i, name in enumerate(names)}
    yield Recorded(f"slices of {len(fused)} targets", slices, fused)
    memory = torch.empty(count, 16, 32, dtype=torch.bfloat16)
    views = dict(zip(names, memory))
    yield Recorded("targets of one storage", views, views)


def record(count: int, directory: pathlib.Path) -> None:
    from rekindle.recording import TensorMeta
    os.environ["REKINDLE_CACHE"] = str(directory / "cache")
    for case in recorded(count):
        catalog = {name: TensorMeta((64, 32), torch.bfloat16) for name in case.places}
        _record(case, catalog)


def _record(case: Recorded, catalog: dict[str, Any]) -> None:
    from rekindle import recording
    from rekindle.recording import cache

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            case.places[name].copy_(tensor.view(4, 16, 32)[1])

    steps: dict[str, tuple[float, float]] = {}

    def timed(label: str, call: Callable[[], Any]) -> Any:
        begun, cpu = time.perf_counter(), time.process_time()
        made = call()
        steps[label] = time.perf_counter() - begun, time.process_time() - cpu
        return made

    def mark() -> str:
        return recording.fingerprint(catalog, case.targets, (load,), {})

    plan = timed("record", lambda: recording.record(load, catalog, case.targets))
    mark()  # what it keeps of this process
    key = timed("fingerprint", mark)
    stored = timed("store", lambda: cache.store(key, plan))
    again = timed("load from the cache", lambda: cache.load(key))
    same = stored and again is not None and list(again.moves()) == list(plan.moves())
    print(f"plan of {len(catalog)} tensors, {case.label}, two views and a copy each: "
          + ", ".join(f"{label} {wall:.3f} s ({cpu:.3f} of CPU)"
                      for label, (wall, cpu) in steps.items())
          + f"; {len(plan)} moves, {len(plan.opaque)} opaque, "
          + ("the same from the cache" if same else "ANOTHER ONE FROM THE CACHE"))
    if not same or plan.opaque:
        sys.exit(1)


def compare(options: argparse.Namespace, directory: pathlib.Path) -> bool:
    device = torch_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    files = directory / "model"
    files.mkdir()
    model = (llama(options.gib, device, files) if options.hf
             else even_model(options.gib, options.tensors, device, files))
    fleet = Fleet(directory, options.device)
    try:
        small = {path.name: path.read_bytes() for path in files.glob("*.json")}
        rekindle.publish(model.known, "m@1", files=small, agent=fleet.store, timeout=PATIENCE_S)
        wait_until_pinned(fleet, model.nbytes)
        return Benchmark(model, "m", fleet, options.device).report(options.runs)
    finally:
        fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=512)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hf", action="store_true", help="a Llama model of transformers")
    parser.add_argument("--record", type=int, metavar="N", help="only the recording of N tensors")
    parser.add_argument("--directory", default="/dev/shm", help="page cache: tmpfs, or files read "
                        "before")
    options = parser.parse_args()
    if options.hf:
        import transformers

        import rekindle.torch  # noqa: F401
        transformers.utils.logging.disable_progress_bar()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="python-load.", dir=options.directory))
    try:
        if options.record is not None:
            record(options.record, directory)
        elif not compare(options, directory):
            sys.exit("bytes are wrong")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
