"""From the death of an engine to the first token of its successor, without and with what Rekindle does about it.

    REKINDLE_BINARY=… REKINDLE_LIBRARY=… PYTHONPATH=python \\
        python tests/bench/first_token.py [--engine transformers|vllm] [--gib N] [--device cuda:0|double:0]
            [--runs N] [--ways WAY,…] [--directory DIR] [--logs DIR] [-- ARGUMENTS OF VLLM]

The engine is a Llama model with random weights under `rekindle run`: transformers' generate without compiled graphs, or
vLLM's server as it comes, with compiled graphs. `rekindle drill kill --first-token` kills it and tells the time line.
Prints each run, and the median of each phase, in seconds, for each way: as it is; with resident weights; with a
standby; with both. `load` without residency is an upload from this host's copy, and a successor finds the compile
caches of its predecessor. For vLLM also: from the start to the first token on a host without compile caches, and on one
that fetches them as artifacts. Every answer must be the same token. Needs torch, transformers, and vLLM for it.
"""
from __future__ import annotations

import argparse
import configparser
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bench_fleet import Fleet

import rekindle

GIB = 1 << 30
PATIENCE_S = 300.0
HERE = pathlib.Path(__file__).parent
PROJECT = HERE.parents[1] / "python/pyproject.toml"
WAYS = {"as it is": (False, 0), "resident": (True, 0), "standby": (False, 1), "both": (True, 1)}
PHASES = ("detect", "restart", "start", "takeover", "load", "commit", "first_token")
QUIET_S = 5


def publish_llama(gib: float, device: torch.device, model_directory: pathlib.Path, store: pathlib.Path) -> None:
    """Publishes llm@1, and writes its configuration and a tokenizer of numbers."""
    import tokenizers
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
    config.dtype = "bfloat16"
    config.save_pretrained(model_directory)
    words = {f"t{number}": number for number in range(config.vocab_size)}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words, "t0"))).save_pretrained(model_directory)
    print(f"{sum(value.nbytes for value in model.state_dict().values()) / GIB:.2f} GiB")


def ask(url: str, body: object | None = None) -> str | None:
    """None: the engine does not answer yet."""
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return None


class Transformers:
    """first_token_engine.py"""

    def __init__(self, model: pathlib.Path, device: str) -> None:
        self.model, self.device = model, device
        self.environment: dict[str, str] = {}

    def command(self, port: int, resident: bool) -> list[object]:
        return [sys.executable, HERE / "first_token_engine.py", self.model / "config.json", self.device, port,
                "yes" if resident else "no"]

    def question(self, port: int) -> tuple[str, object | None]:
        return f"http://127.0.0.1:{port}/token", None

    def answer(self, port: int) -> tuple[str, str] | None:
        """The token, and the rung of the weights."""
        said = ask(*self.question(port))
        if not said:
            return None
        token, rung = said.split()
        return token, rung


class Vllm:
    """vLLM's OpenAI server."""

    def __init__(self, model: pathlib.Path, more: list[str]) -> None:
        self.model, self.more = model, more
        # Where vLLM finds the plugin as that of an installed wheel, in every process of its own.
        about = model / "site/rekindle-0.dist-info"
        about.mkdir(parents=True)
        points = configparser.ConfigParser(delimiters="=")
        points.read_dict(tomllib.loads(PROJECT.read_text())["project"]["entry-points"])
        with open(about / "entry_points.txt", "w") as file:
            points.write(file)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rekindle\nVersion: 0\n")
        self.environment = {
            "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(about.parent)]), "HF_HUB_OFFLINE": "1",
            "VLLM_PLUGINS": "rekindle", "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1", "REKINDLE_CACHE": str(model / "plans"),
            "VLLM_CACHE_ROOT": str(model / "caches")}

    def command(self, port: int, resident: bool) -> list[object]:
        options = {"model": "llm", **({"resident": True} if resident else {})}
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
                "--served-model-name", "llm", "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16",
                "--max-model-len", "2048", "--seed", "0", "--load-format", "rekindle",
                "--model-loader-extra-config", json.dumps(options), "--worker-extension-cls",
                "rekindle.vllm.WorkerExtension", *self.more]

    def question(self, port: int) -> tuple[str, object | None]:
        return f"http://127.0.0.1:{port}/v1/completions", {
            "model": "llm", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0,
            "return_tokens_as_token_ids": True, "logprobs": 1}

    def answer(self, port: int) -> tuple[str, str] | None:
        said = ask(*self.question(port))
        if said is None:
            return None
        status = ask(f"http://127.0.0.1:{port}/collective_rpc", {"method": "rekindle_status"})
        assert status is not None
        rung = json.loads(status)["results"][0]["target"]["rung"]
        return json.loads(said)["choices"][0]["logprobs"]["tokens"][0], rung


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(fleet: Fleet, engine: Transformers | Vllm, port: int, resident: bool,
            *options: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [os.environ["REKINDLE_BINARY"], "run", "--always", "--model", "llm@1", "--instance", "llm",
               "--store", fleet.store, "--coordinator", fleet.coordinator, "--crash-loop", 2, *options, "--", *engine.command(port, resident)]
    with open(fleet.directory / "run.log", "ab") as log:
        run = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               env={**os.environ, **engine.environment})
    try:
        yield run
    finally:
        run.terminate()
        run.wait(PATIENCE_S)


def standbys_ready(log: pathlib.Path) -> int:
    """How many standbys have waited so far, by the log of `run`."""
    return log.read_text().count("is ready after") if log.exists() else 0


def wait_for(what: str, run: subprocess.Popen[bytes], done) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if run.poll() is not None:
            sys.exit(f"{what}: `rekindle run` has ended with code {run.returncode}")
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def drill(fleet: Fleet, run: subprocess.Popen[bytes], url: str, body: object | None) -> dict[str, float]:
    post = [] if body is None else ["--first-token-body", json.dumps(body)]
    kill = subprocess.Popen(
        [os.environ["REKINDLE_BINARY"], "drill", "kill", "llm", "--first-token", url, *post, "--coordinator",
         fleet.coordinator, "--yes", "--json", "--timeout", f"{PATIENCE_S:.0f}s"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while True:
        try:
            out, err = kill.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            if run.poll() is not None:
                kill.kill()
                kill.wait()
                sys.exit(f"drill: `rekindle run` has ended with code {run.returncode}, so nothing takes over")
    if kill.returncode != 0:
        sys.exit(f"drill: {err or out}")
    report = json.loads(out)
    took = {phase["phase"]: float(phase["took_s"]) for phase in report["timeline"]}
    took["all"] = max(step["after_s"] for step in report["steps"])
    return took


def started(fleet: Fleet, engine: Transformers | Vllm, *options: object, until=lambda: True) -> tuple[float, str]:
    """Returns the seconds from the start of `run` to the first token, and the token."""
    port, begun = free_port(), time.monotonic()
    with running(fleet, engine, port, False, *options) as run:
        wait_for("the engine", run, lambda: engine.answer(port))
        took = time.monotonic() - begun
        found = engine.answer(port)
        wait_for("artifacts", run, until)
    assert found is not None
    return took, found[0]


def starts(fleet: Fleet, engine: Vllm) -> set[str]:
    """Prints the times of starts without compile caches, and with those that another host has published."""
    caches = pathlib.Path(engine.environment["VLLM_CACHE_ROOT"])

    def published() -> bool:
        listed = subprocess.run(
            [os.environ["REKINDLE_BINARY"], "artifacts", "list", "--json", "--store", fleet.store, "--coordinator",
             fleet.coordinator], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        return bool(json.loads(listed.stdout)["artifacts"])

    artifacts = ("--artifacts", f"vllm={caches}", "--artifacts-fingerprint", "bench", "--artifacts-quiet", f"{QUIET_S}s")
    cold, first = started(fleet, engine, *artifacts, until=published)
    shutil.rmtree(caches)
    fetched, second = started(fleet, engine, *artifacts)
    print(f"start, no caches {cold:.1f} s; with artifacts {fetched:.1f} s", flush=True)
    return {first, second}


def killed(fleet: Fleet, engine: Transformers | Vllm, resident: bool, standbys: int) -> tuple[dict[str, float], set[str]]:
    """Returns what each phase took, and the tokens."""
    port, log = free_port(), fleet.directory / "run.log"
    before = standbys_ready(log)
    # A new engine each time: one that has died twice in a row starts later.
    with running(fleet, engine, port, resident, "--standby", standbys) as run:
        wait_for("the first engine", run, lambda: engine.answer(port))
        first = engine.answer(port)
        if standbys:
            wait_for("the standby", run, lambda: standbys_ready(log) > before)
        took = drill(fleet, run, *engine.question(port))
        second = engine.answer(port)
    assert first is not None and second is not None
    if (second[1] == "resident") != resident:
        sys.exit(f"the successor got its weights from: {second[1]}")
    return took, {first[0], second[0]}


def print_row(name: str, took: dict[str, float]) -> None:
    print(f"{name:10}" + "".join(f"{took.get(phase, 0.0):12.3f}" for phase in (*PHASES, "all")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ways", default=",".join(("start", *WAYS)), help="of: %(default)s; `start` is for vLLM")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("/dev/shm"))
    parser.add_argument("--logs", type=pathlib.Path, help="where the logs of engines and daemons stay")
    parser.add_argument("more", nargs="*")
    given = parser.parse_args()
    # The logs are kept, and memory is given back, also when time is up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("first_token: ended by SIGTERM"))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-bench.", dir=given.directory))
    fleet = Fleet(directory, given.device, drills=True)
    try:
        on = torch.device("cpu" if given.device.startswith("double:") else given.device)
        model = directory / "model"
        publish_llama(given.gib, on, model, fleet.store)
        if on.type == "cuda":
            torch.cuda.empty_cache()
        answers: set[str] = set()
        engine: Transformers | Vllm = Transformers(model, given.device)
        ways = given.ways.split(",")
        if given.engine == "vllm":
            engine = Vllm(model, given.more)
            if "start" in ways:
                answers |= starts(fleet, engine)
        print(f"{'':10}" + "".join(f"{phase:>12}" for phase in (*PHASES, "all")))
        for way in [way for way in ways if way in WAYS]:
            runs = []
            for _ in range(given.runs):
                took, tokens = killed(fleet, engine, *WAYS[way])
                runs.append(took)
                answers |= tokens
                if given.runs > 1:
                    print_row("", took)
            print_row(way, {phase: statistics.median(run.get(phase, 0.0) for run in runs) for phase in (*PHASES, "all")})
        if len(answers) != 1:
            sys.exit(f"the engines do not agree about the first token: {sorted(answers)}")
    except BaseException:
        for log in directory.glob("*.log"):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-16000:]}\n")
        raise
    finally:
        fleet.close()
        if given.logs is not None:
            given.logs.mkdir(parents=True, exist_ok=True)
            for log in directory.glob("*.log"):
                shutil.copy(log, given.logs)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
