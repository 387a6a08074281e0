"""The recipes of docs/guides/engines.md, word for word: the prerequisites with the real command, and
the requests against vLLM's own router in dev mode."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from .models import llama, saved
from .run_vllm import run_vllm

ROOT = pathlib.Path(__file__).resolve().parents[3]
PATIENCE_S = 120


def blocks():
    """The shell blocks of the page, in order."""
    page = (ROOT / "docs/guides/engines.md").read_text()
    return re.findall(r"```sh\n(.*?)```", page, re.DOTALL)


def block_with(text):
    found, = [block for block in blocks() if text in block]
    return found


@pytest.fixture(scope="module")
def paths(rekindle, memory_directory):
    made = {version: saved(llama, memory_directory / f"qwen3-{version}", version)
            for version in (41, 42)}
    for version, path in made.items():
        rekindle.publish(f"qwen3@{version}", path)
    return made


def test_e5_the_prerequisites_publish_a_model(rekindle, paths, tmp_path, memory_directory):
    binary = tmp_path / "bin"
    binary.mkdir()
    (binary / "rekindle").symlink_to(os.environ["REKINDLE_BINARY"])
    script = block_with("rekindle coordinator").replace("7300", "17300")
    done = subprocess.run(
        ["bash", "-ec", f"trap 'kill $(jobs -p)' EXIT\n{script}\nrekindle status --json --store "
         '"$STORE"'],
        env={**rekindle.environment, "PATH": f"{binary}:{os.environ['PATH']}",
             "STATE": str(tmp_path / "state"), "STORE": str(memory_directory / "recipe"),
             "CHECKPOINT": str(paths[41])},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert '"qwen3' in done.stdout and "41" in done.stdout


def test_e5_the_requests_are_those_of_vllms_router(rekindle, paths, monkeypatch, tmp_path):
    assert shutil.which("curl"), "the recipes need curl"
    monkeypatch.setenv("REKINDLE_STORE", str(rekindle.store("a")))
    without_weights = tmp_path / "model"  # what an engine needs at --model
    shutil.copytree(paths[41], without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    scripts = [block_with('"$SERVER/collective_rpc"'), block_with('"$SERVER/update_weights"')]
    said, = run_vllm(
        rekindle, paths[41], {"model": "qwen3", "version": 41}, config=str(without_weights),
        serve=[{"script": script, "path": str(paths[42])} for script in scripts])
    assert "error" not in said and said["differ"] == [], said
    for one in said["serve"]:
        assert one["code"] == 0, one["log"]
        assert one["differ"] == [] and one["status"]["version"] == 42, one
        assert one["status"]["torn"] is None
    assert {"pause_generation", "reset_prefix_cache", "resume_generation"} <= set(
        said["serve"][0]["calls"])
    assert {"start_weight_update", "update_weights", "finish_weight_update"} <= set(
        said["serve"][1]["calls"])
