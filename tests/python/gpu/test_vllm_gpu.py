"""vLLM's engine on a real GPU with load format rekindle: it generates what it does of files.

    python -m pytest tests/python/gpu/test_vllm_gpu.py

Without vLLM or a GPU these are skipped, and fail when REKINDLE_REQUIRE_VLLM is set.
REKINDLE_TEST_VLLM_ARGS: more arguments of vllm.LLM, as JSON: '{"attention_backend": "TRITON_ATTN"}'.
"""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from conftest import gpu_fleet

HERE = pathlib.Path(__file__).parent
PATIENCE_S = 600  # the first one compiles kernels
MORE = json.loads(os.environ.get("REKINDLE_TEST_VLLM_ARGS", "{}"))

if importlib.util.find_spec("vllm") is None:
    assert not os.environ.get("REKINDLE_REQUIRE_VLLM"), "vLLM is not installed"
    pytest.skip("vLLM is not installed: its engine has not run on a GPU", allow_module_level=True)


class Engine:
    """One that says nothing for PATIENCE_S is killed."""

    def __init__(self, environment, **job):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "vllm_engine.py", json.dumps({**job, "more": MORE})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.says()["starts"]

    def says(self):
        watch = threading.Timer(PATIENCE_S, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith("SAID "):
                    return json.loads(line.removeprefix("SAID "))
        finally:
            watch.cancel()
        raise AssertionError(f"the engine has ended with code {self._process.wait()}")

    def ask(self, *order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.says()

    def kill(self):
        self._process.kill()
        self._process.communicate()

    def end(self):
        self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def fleet(memory_directory):
    with gpu_fleet(memory_directory, "vLLM has not run on CUDA") as running:
        yield running


@pytest.fixture(scope="module")
def environment(fleet):
    return {**os.environ, "REKINDLE_CACHE": str(fleet.directory / "cache")}


@pytest.fixture(scope="module")
def checkpoints(fleet, memory_directory):
    """Version → directory of a model of 1.1 GiB."""
    import torch
    import transformers
    paths = {}
    for version in (1, 2):
        torch.manual_seed(version)
        config = transformers.LlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=9,
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=512)
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        paths[version] = memory_directory / f"llama-{version}"
        model.save_pretrained(paths[version])
        fleet.publish(f"llama@{version}", paths[version])
        del model
    torch.cuda.empty_cache()
    return paths


@pytest.fixture(scope="module")
def outputs(checkpoints, environment):
    """Version → what vLLM generates when it has loaded the files by itself."""
    found = {}
    for version, path in checkpoints.items():
        engine = Engine(environment, path=str(path), load_format="auto")
        assert engine.says()["status"] == [{}]
        found[version] = engine.ask("generate")["outputs"]
        engine.end()
    assert found[1] != found[2]
    return found


def test_it_generates_the_same_is_updated_and_comes_back(fleet, checkpoints, environment, outputs):
    options = {"model": "llama", "version": 1, "agent": str(fleet.store("a")), "instance": "llm"}
    job = {"path": str(checkpoints[1]), "load_format": "rekindle", "options": options}
    engine = Engine(environment, **job)
    status, = engine.says()["status"]
    assert (status["target"]["model"], status["target"]["version"]) == ("llama", 1), status
    assert engine.ask("generate")["outputs"] == outputs[1]

    updated = engine.ask("rekindle_update", 2)
    assert [one["version"] for one in updated["rekindle_update"]] == [2], updated
    assert engine.ask("forget") == {"forgotten": True}
    assert engine.ask("generate")["outputs"] == outputs[2]
    refused = engine.ask("rekindle_update", 7)
    assert refused["error"][0] == "NotFoundError", refused
    assert engine.ask("generate")["outputs"] == outputs[2]
    engine.kill()

    Engine(environment, **job).kill()  # while it makes its model, or loads
    engine = Engine(environment, **{**job, "options": {**options, "version": "latest"}})
    status, = engine.says()["status"]
    assert (status["target"]["version"], status["target"]["rung"]) == (2, "local"), status
    assert engine.ask("generate")["outputs"] == outputs[2]
    engine.end()
