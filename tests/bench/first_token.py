"""From the death of an engine to the first token of its successor, without and with what Rekindle does about it.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/first_token.py [--gib N] [--device cuda:0|double:0] [--runs N] [--directory DIR]

The engine is a Llama model of transformers with random weights, without compiled graphs, under `rekindle run`.
`rekindle drill kill --first-token` kills it and tells the time line. Prints the median of each phase, in seconds, for
each way: as it is; with resident weights; with a standby; with both. `load` without residency is an upload from this
host's copy. Every answer must be the same token. Needs torch and transformers.
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench_fleet import Fleet

import rekindle

GIB = 1 << 30
PATIENCE_S = 300.0
ENGINE = pathlib.Path(__file__).with_name("first_token_engine.py")
WAYS = {"as it is": (False, 0), "resident": (True, 0), "standby": (False, 1), "both": (True, 1)}
PHASES = ("detect", "restart", "start", "takeover", "load", "commit", "first_token")


def publish_llama(gib: float, device: torch.device, directory: pathlib.Path, store: pathlib.Path) -> pathlib.Path:
    """Publishes llm@1. Returns the path of its configuration."""
    import transformers
    hidden = 4096 if gib >= 1 else 128
    layer = hidden * hidden * (2.5 + 3 * 3.5) * 2
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, vocab_size=8 * hidden,
        num_hidden_layers=max(1, int((gib * GIB - 32 * hidden * hidden) / layer)), num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 128, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    with device:
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    rekindle.publish(model, "llm@1", agent=store)
    path = directory / "config.json"
    config.to_json_file(path)
    print(f"{sum(value.nbytes for value in model.state_dict().values()) / GIB:.2f} GiB")
    return path


def token(port: int) -> str:
    """Of the engine. "": it does not answer yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/token", timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def engine(fleet: Fleet, config: pathlib.Path, device: str, port: int, resident: bool,
           standbys: int) -> Iterator[subprocess.Popen[bytes]]:
    with open(fleet.directory / "run.log", "ab") as log:
        run = subprocess.Popen(
            [os.environ["REKINDLE_BINARY"], "run", "--model", "llm@1", "--instance", "llm", "--store", fleet.store,
             "--standby", str(standbys), "--", sys.executable, ENGINE, config, device, str(port),
             "yes" if resident else "no"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield run
    finally:
        run.terminate()
        run.wait(PATIENCE_S)


def standbys_ready(log: pathlib.Path) -> int:
    """How many standbys have waited so far, by the log of `run`."""
    return log.read_text().count("is ready after") if log.exists() else 0


def wait_for(what: str, done) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def drill(fleet: Fleet, port: int) -> dict[str, float]:
    done = subprocess.run(
        [os.environ["REKINDLE_BINARY"], "drill", "kill", "llm", "--first-token", f"http://127.0.0.1:{port}/token",
         "--coordinator", fleet.coordinator, "--yes", "--json", "--timeout", f"{PATIENCE_S:.0f}s"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"drill: {done.stderr or done.stdout}")
    report = json.loads(done.stdout)
    took = {phase["phase"]: float(phase["took_s"]) for phase in report["timeline"]}
    took["all"] = max(step["after_s"] for step in report["steps"])
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("/dev/shm"))
    given = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=given.directory))
    fleet = Fleet(directory, given.device, drills=True)
    try:
        on = torch.device("cpu" if given.device.startswith("double:") else given.device)
        config = publish_llama(given.gib, on, directory, fleet.store)
        if on.type == "cuda":
            torch.cuda.empty_cache()
        answers: set[str] = set()
        print(f"{'':10}" + "".join(f"{phase:>12}" for phase in (*PHASES, "all")))
        for way, (resident, standbys) in WAYS.items():
            runs = []
            for _ in range(given.runs):
                # A new engine each time: one that has died twice in a row starts later.
                port = free_port()
                log = fleet.directory / "run.log"
                before = standbys_ready(log)
                with engine(fleet, config, given.device, port, resident, standbys):
                    wait_for("the first engine", lambda port=port: token(port))
                    answers.add(token(port).split()[0])
                    if standbys:
                        wait_for("the standby", lambda log=log, before=before: standbys_ready(log) > before)
                    runs.append(drill(fleet, port))
                    found, rung = token(port).split()
                    answers.add(found)
                    if (rung == "resident") != resident:
                        sys.exit(f"{way}: the successor got its weights from: {rung}")
            medians = {phase: statistics.median(run.get(phase, 0.0) for run in runs) for phase in (*PHASES, "all")}
            print(f"{way:10}" + "".join(f"{medians[phase]:12.3f}" for phase in medians), flush=True)
        if len(answers) != 1:
            sys.exit(f"the engines do not agree about the first token: {sorted(answers)}")
    except BaseException:
        for log in directory.glob("*.log"):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")
        raise
    finally:
        fleet.close()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
