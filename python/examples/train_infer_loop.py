"""A training loop with inference workers that follow its versions, on one machine.

Trains a small language model. After every round the trainer publishes its weights and updates all
workers at once. The workers generate text, which is compared with the text of the trainer's own
model. Then the example kills one worker and starts it again. Its weights are still in the host's
memory.

    python train_infer_loop.py                # GPUs made of host memory
    python train_infer_loop.py --device cuda  # two GPUs
    python train_infer_loop.py --device cpu   # host memory alone

Starts its own coordinator and agent. Needs torch. Exit code 0: every comparison was equal.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle._library import command_path

MODEL, GROUP = "tiny-lm", "rollout"
TEXT = ("the agent keeps the weights in memory and the worker takes them from there. "
        "a worker that dies comes back and finds them. ")
ALPHABET = sorted(set(TEXT))
PROMPT, LENGTH, CONTEXT = "the worker ", 24, 12
PATIENCE_S = 60.0


class TinyLm(nn.Module):
    """Predicts the next of a few characters from the last CONTEXT ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32)
        self.hidden = nn.Linear(32 * CONTEXT, 128)
        self.head = nn.Linear(128, len(ALPHABET))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, CONTEXT] → logits [batch, alphabet]."""
        logits: torch.Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens).flatten(1))))
        return logits


def encode(text: str) -> torch.Tensor:
    return torch.tensor([ALPHABET.index(c) for c in text])


@torch.no_grad()
def generate(model: TinyLm) -> dict[str, str]:
    """Returns the text after PROMPT, and a digest of all logits, which is equal only if all bits
    are."""
    device = model.head.weight.device
    text, digest = PROMPT, hashlib.sha256()
    for _ in range(LENGTH):
        logits = model(encode(text[-CONTEXT:].rjust(CONTEXT)).unsqueeze(0).to(device))[0]
        digest.update(logits.cpu().numpy().tobytes())
        text += ALPHABET[int(logits.argmax())]
    return {"text": text, "logits": digest.hexdigest()[:16]}


# --- an inference worker, a separate process


def attach(version: Any, name: str, device: str | None, generation: int) -> rekindle.Session:
    return rekindle.attach(MODEL, version, instance=name, generation=generation, group=GROUP,
                           device=device, timeout=PATIENCE_S)


def run_worker(name: str, device: str | None) -> None:
    """Answers each line of stdin with generated text. Moves to new versions meanwhile."""
    torch.set_num_threads(1)
    model = TinyLm().to(device if device and device.startswith("cuda") else "cpu")
    begun, generation = time.perf_counter(), time.time_ns() // 1_000_000
    session = attach("latest", name, device, generation)
    session.load_into(model)
    session.commit(PATIENCE_S)
    say(ready=session.version, rung=session.rung, seconds=time.perf_counter() - begun)
    while True:
        version = session.wait_for_update(0.0)
        if version is not None:
            session.close()
            generation += 1
            session = attach(version, name, device, generation)
            session.load_into(model)
            session.commit(PATIENCE_S)
        elif select.select([sys.stdin], [], [], 0.01)[0]:
            if not sys.stdin.readline():
                return
            say(version=session.version, **generate(model))


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Worker:
    """A worker's process, as the trainer uses it."""

    def __init__(self, index: int, device: str | None) -> None:
        self.name, self._device = f"worker-{index}", device
        self.start()

    def start(self) -> dict[str, Any]:
        """Starts the process, or starts it again. Returns when it serves."""
        line = [sys.executable, __file__, "--worker", self.name]
        line += ["--worker-device", self._device] if self._device else []
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ready = self._answer()
        return self.ready

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE_S)[0]:
            raise SystemExit(f"{self.name} has said nothing for {PATIENCE_S} s")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended with {self.process.wait()}")
        return dict(json.loads(line))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


# --- the fleet of one host


@contextlib.contextmanager
def fleet(gpu: str | None, parent: str | None) -> Iterator[None]:
    """Runs a coordinator and an agent. Workers and `rekindle` find them by the environment.

    `parent`: the directory for the temporary store."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-example.", dir=parent))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        address = daemon(processes, directory, "coordinator", "--state", str(directory / "state"))
        os.environ.update(REKINDLE_STORE=str(directory / "store"), REKINDLE_COORDINATOR=address)
        daemon(processes, directory, "agent", *(["--gpu", gpu] if gpu else []))
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def daemon(processes: list[subprocess.Popen[bytes]], directory: pathlib.Path, role: str,
           *arguments: str) -> str:
    with open(directory / f"{role}.log", "wb") as log:
        process = subprocess.Popen(
            [command_path(), role, "--listen", "127.0.0.1:0", "--json", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
    processes.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{role} did not come up: {(directory / f'{role}.log').read_text()}")
    return str(json.loads(line)["listen"])


# --- the trainer


def train(model: TinyLm, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Trains and returns the last loss."""
    tokens = encode(" " * CONTEXT + TEXT).to(model.head.weight.device)
    windows = tokens.unfold(0, CONTEXT + 1, 1)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def check(worker: Worker, version: int, expected: dict[str, str]) -> None:
    said = worker.ask()
    same = {"version": version, **expected} == said
    print(f"  {worker.name} at version {said['version']}: {said['text']!r}"
          f"{'' if same else f'   MISMATCH: the trainer says {expected}'}")
    if not same:
        raise SystemExit(1)


def publish_and_update(model: TinyLm, version: int, workers: list[Worker]) -> None:
    rekindle.publish(model, f"{MODEL}@{version}")
    if workers:
        result = rekindle.update(f"{MODEL}@{version}", group=GROUP, timeout=PATIENCE_S)
        print(f"  updated {result.ready} of {result.members} workers, {result.by_broadcast} by "
              f"broadcast, in {result.elapsed * 1e3:.0f} ms")
        if result.ready != len(workers):
            raise SystemExit(f"only {result.ready} of {len(workers)} workers are ready")


def loop(rounds: int, devices: list[str | None]) -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    on = "cuda" if devices[0] and devices[0].startswith("cuda") else "cpu"
    model = TinyLm().to(on)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    workers: list[Worker] = []
    try:
        for version in range(1, rounds + 1):
            loss = train(model, optimizer, 4)
            print(f"round {version}: loss {loss:.3f}", flush=True)
            publish_and_update(model, version, workers)
            if not workers:
                workers = [Worker(index, device) for index, device in enumerate(devices)]
            for worker in workers:
                check(worker, version, generate(model))
        victim = workers[-1]
        victim.kill()
        print(f"{victim.name} is killed, and started again")
        back = victim.start()
        print(f"  it serves version {back['ready']} {back['seconds'] * 1e3:.0f} ms after it asked, "
              f"from: {back['rung']}")
        check(victim, rounds, generate(model))
        print("and training goes on")
        train(model, optimizer, 4)
        publish_and_update(model, rounds + 1, workers)
        for worker in workers:
            check(worker, rounds + 1, generate(model))
    finally:
        for worker in workers:
            worker.close()
    print("all as it should be")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("double", "cuda", "cpu"), default="double")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default="/dev/shm" if os.path.isdir("/dev/shm") else None,
                        help="parent directory of the temporary store [%(default)s]")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-device", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.worker, arguments.worker_device)
        return
    # Cleans up at SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    kind = arguments.device
    devices = [None if kind == "cpu" else f"{kind}:{index}" for index in range(2)]
    gpu = {"double": "double:2", "cuda": None, "cpu": "none"}[kind]
    with fleet(gpu, arguments.directory):
        loop(arguments.rounds, devices)


if __name__ == "__main__":
    main()
