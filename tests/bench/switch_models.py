#!/usr/bin/env python3
"""Several models take turns on one GPU: how long it takes from the last token of one to the first of the next.

    tests/bench/switch_models.py                                  # a GPU made of host memory, small models
    tests/bench/switch_models.py --device cuda --models 4 --gib 30 --switches 100

Publishes the models, starts a worker with rekindle.torch.Models, and lets `rekindle switch` send it round the ring. Each
first token is compared with that of the same model before its publication. Beside it, in the same process, the same
number of bytes is copied from plain pinned memory. The host needs memory for all models. Prints a line of JSON at the
end.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
BINARY = os.environ.setdefault("REKINDLE_BINARY", str(ROOT / "build/dev/bin/rekindle"))
os.environ.setdefault("REKINDLE_LIBRARY", str(ROOT / "build/dev/src/client/librekindle.so.1"))

import rekindle  # noqa: E402
import rekindle.torch  # noqa: E402

INSTANCE, VOCABULARY, HEADS = "gpu-0", 4096, 8
PROMPT = torch.arange(1, 17).unsqueeze(0)


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Decoder(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1]).argmax(-1)


def build(layers: int, width: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(layers, width).to(torch.bfloat16)


def publish(name: str, seed: int, layers: int, width: int, on: str, store: pathlib.Path) -> int:
    """Returns the model's first token."""
    model = build(layers, width).to_empty(device=on)
    generator = torch.Generator(device=on).manual_seed(seed)
    for value in model.parameters():
        value.normal_(0.0, 0.02, generator=generator)
    token = int(model(PROMPT.to(on)))
    rekindle.publish(model, f"{name}@1", agent=store)
    return token


@contextlib.contextmanager
def agent(directory: pathlib.Path, gpu: str):
    store = directory / "store"
    log = open(directory / "agent.log", "wb")
    process = subprocess.Popen([BINARY, "agent", "--listen", "127.0.0.1:0", "--store", str(store), "--gpu", gpu, "--json"],
                               stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None and process.stdout.readline(), (directory / "agent.log").read_text()
        yield store
    finally:
        process.terminate()
        process.wait(60)


def synchronize(on: str) -> None:
    if on != "cpu":
        torch.cuda.synchronize()


def plain_copy(size: int, on: str) -> float:
    """Seconds to copy `size` bytes from pinned memory, the best of five."""
    chunk = min(size, 2 << 30)
    source = torch.zeros(chunk, dtype=torch.uint8)
    if on != "cpu":
        source = source.pin_memory()
    target = torch.empty(chunk, dtype=torch.uint8, device=on)
    times = []
    for _ in range(6):
        synchronize(on)
        begun = time.perf_counter()
        left = size
        while left > 0:
            target[:min(left, chunk)].copy_(source[:min(left, chunk)], non_blocking=True)
            left -= chunk
        synchronize(on)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def ask(store: pathlib.Path, ring: list[str], count: int, failed: list[str], done: threading.Event) -> None:
    for number in range(1, count + 1):
        said = subprocess.run([BINARY, "switch", INSTANCE, f"{ring[number % len(ring)]}@1", "--store", str(store)],
                              capture_output=True, text=True)
        if said.returncode:
            failed.append(said.stderr)
            break
    done.set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="double:0")
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--gib", type=float, default=0.02, help="of each model")
    parser.add_argument("--width", type=int, help="4096 on a GPU")
    parser.add_argument("--switches", type=int, default=12)
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--directory", default="/dev/shm")
    options = parser.parse_args()
    double = options.device.startswith("double:")
    on = "cpu" if double else options.device
    width = options.width or (128 if double else 4096)
    layers = max(1, round(options.gib * (1 << 30) / (12 * width * width * 2)))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-switch.", dir=options.directory))
    ring = [f"m{number}" for number in range(options.models)]
    try:
        with torch.no_grad(), agent(directory, "double:1" if double else "auto") as store:
            known = {name: publish(name, seed, layers, width, on, store) for seed, name in enumerate(ring)}
            if not double:
                rekindle.publication.release_pinned()
                torch.cuda.empty_cache()
            return measure(options, store, ring, known, layers, width, on)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(options, store, ring, known, layers, width, on) -> int:
    prompt = PROMPT.to(on)
    models = rekindle.torch.Models({name: build(layers, width) for name in ring}, device=options.device, instance=INSTANCE,
                                   agent=store, resident=options.resident)
    size = sum(value.numel() * value.element_size() for value in build(layers, width).parameters())
    models.switch(ring[0])
    for name in ring:
        models.prepare(name)
    times: list[float] = []
    phases: list[dict[str, float]] = []
    failed: list[str] = []
    done = threading.Event()
    asking = threading.Thread(target=ask, args=(store, ring, options.switches, failed, done))
    asking.start()
    while not (done.is_set() and (failed or len(times) == options.switches)):
        token = int(models.model(prompt))
        last = time.perf_counter()
        if models.follow(0.0):
            token = int(models.model(prompt))
            times.append(time.perf_counter() - last)
            phases.append(models.phases)
        if token != known[models.name]:
            failed.append(f"{models.name} says {token}, and said {known[models.name]}")
            break
    asking.join()
    path, rung = models.session.device_path, models.session.rung
    models.close()
    if failed:
        print(failed[0], file=sys.stderr)
        return 1
    floor = plain_copy(size, on)
    times.sort()
    p99 = times[min(len(times) - 1, -(-99 * len(times) // 100) - 1)]
    middle = statistics.median(times)
    print(f"{len(times)} switches among {len(ring)} models of {size / 2**30:.2f} GiB on {options.device}, {path}, {rung}")
    print(f"last token to first token: median {middle:.3f} s, p99 {p99:.3f} s, worst {times[-1]:.3f} s")
    for phase in phases[0]:
        print(f"  {phase:6} median {statistics.median(one[phase] for one in phases):.3f} s")
    print(f"plain copy of the same bytes from pinned memory: {floor:.3f} s; ratio {middle / floor:.2f}, p99 {p99 / floor:.2f}")
    print(json.dumps({"bytes": size, "models": len(ring), "switches": len(times), "median_s": middle, "p99_s": p99,
                      "worst_s": times[-1], "copy_s": floor, "ratio": middle / floor, "device": options.device}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
