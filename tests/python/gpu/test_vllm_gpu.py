"""vLLM on real GPUs with load format rekindle: it generates what it does of files, on one rank and
on two, as an engine and as a server.

    python -m pytest tests/python/gpu/test_vllm_gpu.py

Without vLLM or a GPU these are skipped, and fail when REKINDLE_REQUIRE_VLLM is set; those that need
more GPUs than there are say so. REKINDLE_TEST_VLLM_ARGS: more arguments of vllm.LLM and of
the server, as JSON: '{"attention_backend": "TRITON_ATTN"}'.
"""
import configparser
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request

import pytest
from conftest import ROOT, eventually, gpu_fleet

HERE = pathlib.Path(__file__).parent
PATIENCE_S = 600  # the first one compiles kernels
MORE = json.loads(os.environ.get("REKINDLE_TEST_VLLM_ARGS", "{}"))
PROMPT = [1, 5, 9, 200, 31]
PLUGINS = "vllm.general_plugins"

if importlib.util.find_spec("vllm") is None:
    assert not os.environ.get("REKINDLE_REQUIRE_VLLM"), "vLLM is not installed"
    pytest.skip("vLLM is not installed: its engine has not run on a GPU", allow_module_level=True)


class Engine:
    """One that says nothing for PATIENCE_S is killed."""

    def __init__(self, environment, **job):
        job["more"] = {**MORE, **job.get("more", {})}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "vllm_engine.py", json.dumps(job)], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.says()["starts"]

    def says(self):
        watch = threading.Timer(PATIENCE_S, self._kill_all)
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

    def _kill_all(self):
        os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self):
        """With its ranks, at once."""
        self._kill_all()
        self._process.communicate()

    def end(self):
        self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0


class Server:
    """vLLM's OpenAI server, with the routes that are for trainers and tests."""

    def __init__(self, environment, path, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._at = f"http://127.0.0.1:{free.getsockname()[1]}"
        more = [word for name, value in MORE.items()
                for word in (f"--{name.replace('_', '-')}", str(value))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path,
             "--served-model-name", "llama", "--host", "127.0.0.1", "--port",
             self._at.rpartition(":")[2], "--enforce-eager", "--dtype", "bfloat16",
             "--max-model-len", "256", "--gpu-memory-utilization", "0.2", "--seed", "0", *more,
             *arguments],
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=sys.stderr,
            env={**environment, "VLLM_SERVER_DEV_MODE": "1"})
        try:
            eventually(self._serves, PATIENCE_S)
        except BaseException:
            self.kill()
            raise

    def _serves(self):
        assert self._process.poll() is None, "the server has ended"
        try:
            return self.get("/health") == b""
        except (urllib.error.URLError, ConnectionError):
            return False

    def get(self, route):
        with urllib.request.urlopen(self._at + route, timeout=PATIENCE_S) as answer:
            return answer.read()

    def post(self, route, **said):
        request = urllib.request.Request(self._at + route, json.dumps(said).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            told = answer.read()
        return json.loads(told) if told else None

    def generate(self):
        """Tokens, and how likely each was."""
        choice, = self.post("/v1/completions", model="llama", prompt=PROMPT, max_tokens=24,
                            temperature=0.0, logprobs=1, ignore_eos=True,
                            return_tokens_as_token_ids=True)["choices"]
        assert len(choice["logprobs"]["tokens"]) == 24
        return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]

    def call(self, method, *arguments):
        """Of every rank."""
        return self.post("/collective_rpc", method=method, args=list(arguments))["results"]

    def kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def fleet(memory_directory):
    with gpu_fleet(memory_directory, "vLLM has not run on CUDA") as running:
        yield running


@pytest.fixture(scope="module")
def environment(fleet):
    """Where vLLM finds the plugin as an installed wheel's, in every process of its own."""
    site = fleet.directory / "site"
    installed = importlib.metadata.entry_points(group=PLUGINS)
    if "rekindle" not in installed.names:
        about = site / "rekindle-0.dist-info"
        about.mkdir(parents=True)
        project = tomllib.loads((ROOT / "python/pyproject.toml").read_text())["project"]
        points = configparser.ConfigParser(delimiters="=")
        points[PLUGINS] = project["entry-points"][PLUGINS]
        with open(about / "entry_points.txt", "w") as file:
            points.write(file)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rekindle\nVersion: 0\n")
    return {**os.environ, "REKINDLE_CACHE": str(fleet.directory / "cache"),
            "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(site)]),
            "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "rekindle", "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}


@pytest.fixture(scope="module")
def checkpoints(fleet, memory_directory):
    """Version → directory of a model of 1.1 GiB, with a tokenizer of numbers."""
    import tokenizers
    import torch
    import transformers
    paths = {}
    words = {f"t{number}": number for number in range(32000)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "t0")))
    for version in (1, 2):
        torch.manual_seed(version)
        config = transformers.LlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=9,
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=512)
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        paths[version] = memory_directory / f"llama-{version}"
        model.save_pretrained(paths[version])
        tokenizer.save_pretrained(paths[version])
        fleet.publish(f"llama@{version}", paths[version])
        del model
    torch.cuda.empty_cache()
    return paths


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request):
    import torch
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, there are {torch.cuda.device_count()}")
    return request.param


@pytest.fixture(scope="module")
def more(ranks):
    return {"tensor_parallel_size": ranks, "disable_custom_all_reduce": True}


@pytest.fixture(scope="module")
def outputs(checkpoints, environment, ranks, more):
    """Version → what vLLM generates when it has loaded the files by itself."""
    found = {}
    for version, path in checkpoints.items():
        engine = Engine(environment, path=str(path), load_format="auto", more=more)
        assert engine.says()["status"] == [{}] * ranks
        found[version] = engine.ask("generate")["outputs"]
        engine.end()
    assert found[1] != found[2]
    return found


def test_it_generates_the_same_is_updated_and_comes_back(fleet, checkpoints, environment, ranks,
                                                         more, outputs):
    options = {"model": "llama", "version": 1, "agent": str(fleet.store("a")),
               "instance": f"llm-{ranks}"}
    job = {"path": str(checkpoints[1]), "load_format": "rekindle", "options": options, "more": more}
    engine = Engine(environment, **job)
    targets = [one["target"] for one in engine.says()["status"]]
    assert [(one["model"], one["version"]) for one in targets] == [("llama", 1)] * ranks, targets
    assert engine.ask("generate")["outputs"] == outputs[1]

    updated = engine.ask("rekindle_update", 2)
    assert [one["version"] for one in updated["rekindle_update"]] == [2] * ranks, updated
    assert engine.ask("forget") == {"forgotten": True}
    assert engine.ask("generate")["outputs"] == outputs[2]
    refused = engine.ask("rekindle_update", 7)
    assert "llama@7" in refused["error"][1], refused
    assert engine.ask("generate")["outputs"] == outputs[2]
    for version, before in ((1, 2), (2, 1)):
        assert "error" not in engine.ask("rekindle_stage", version)
        staged = engine.ask("rekindle_staged", 60.0)["rekindle_staged"]
        assert all(one["staged"] for one in staged), staged
        assert engine.ask("generate")["outputs"] == outputs[before], "the old version serves on"
        switched = engine.ask("rekindle_switch")["rekindle_switch"]
        print(f"staged update to llama@{version}: {[one['phases'] for one in switched]}")
        assert engine.ask("forget") == {"forgotten": True}
        assert engine.ask("generate")["outputs"] == outputs[version]
    engine.kill()

    Engine(environment, **job).kill()  # while it makes its model, or loads
    engine = Engine(environment, **{**job, "options": {**options, "version": "latest"}})
    targets = [one["target"] for one in engine.says()["status"]]
    assert [(one["version"], one["rung"]) for one in targets] == [(2, "local")] * ranks, targets
    assert engine.ask("generate")["outputs"] == outputs[2]
    engine.end()


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_successor_takes_the_model_over_from_memory_of_the_gpu(
        fleet, checkpoints, environment, ranks, more, outputs, quantization):
    """Also after an update in place. It has the same memory for its caches as the first one."""
    name = f"kept-{ranks}-{quantization or 'bf16'}"
    more = {**more, **({"quantization": quantization} if quantization else {})}

    def start(version):
        engine = Engine(environment, path=str(checkpoints[1]), load_format="rekindle", more=more,
                        options={"model": "llama", "version": version, "instance": name,
                                 "agent": str(fleet.store("a")), "resident": True})
        said = engine.says()
        targets = [one["target"] for one in said["status"]]
        print(f"{name}: {[(one['rung'], one['resident']) for one in targets]}, "
              f"{said['kv_blocks']} blocks for caches")
        assert all(one["version"] == (2 if version == "latest" else version) for one in targets)
        return engine, targets, said["kv_blocks"]

    def check(targets, blocks, first_blocks):
        if quantization is None or kept:
            assert [one["rung"] for one in targets] == ["resident"] * ranks, targets
            assert all(one["resident"] for one in targets), targets
        assert abs(blocks - first_blocks) < 0.01 * first_blocks

    engine, targets, first_blocks = start(1)
    kept = all(one["resident"] for one in targets)
    assert kept or quantization, "the model is not resident: the log of the engine says why"
    expected = engine.ask("generate")["outputs"]
    assert quantization or expected == outputs[1]
    engine.kill()

    engine, targets, blocks = start(1)
    check(targets, blocks, first_blocks)
    assert engine.ask("generate")["outputs"] == expected
    updated = engine.ask("rekindle_update", 2)
    assert "error" not in updated, updated
    assert engine.ask("forget") == {"forgotten": True}
    expected = engine.ask("generate")["outputs"]
    assert quantization or expected == outputs[2]
    kept = all(one["target"]["resident"] for one in engine.ask("rekindle_status")["rekindle_status"])
    assert kept or quantization, "the update has ended it: the log of the engine says why"
    engine.kill()

    engine, targets, blocks = start(2)
    check(targets, blocks, first_blocks)
    assert engine.ask("generate")["outputs"] == expected
    engine.end()
    fleet.run("release", "llama", "--store", fleet.store("a"))


@pytest.fixture
def serve(environment):
    started = []

    def start(path, *arguments):
        started.append(Server(environment, path, "--worker-extension-cls",
                              "rekindle.vllm.WorkerExtension", *arguments))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def test_a_server_answers_the_same_is_updated_and_comes_back(fleet, checkpoints, serve):
    expected = {}
    for version, path in checkpoints.items():
        server = serve(path)
        expected[version] = server.generate()
        server.kill()
    assert expected[1] != expected[2]

    def rekindled(version):
        options = {"model": "llama", "version": version, "agent": str(fleet.store("a")),
                   "instance": "served"}
        return serve(checkpoints[1], "--load-format", "rekindle", "--model-loader-extra-config",
                     json.dumps(options))

    server = rekindled(1)
    assert server.generate() == expected[1]
    server.post("/pause")
    updated, = server.call("rekindle_update", 2)
    assert updated["version"] == 2
    server.post("/reset_prefix_cache")
    server.post("/resume")
    assert server.generate() == expected[2]
    server.kill()

    server = rekindled("latest")
    status, = server.call("rekindle_status")
    assert (status["target"]["version"], status["target"]["rung"]) == (2, "local"), status
    assert server.generate() == expected[2]
