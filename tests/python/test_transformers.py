"""transformers' models from this host's copy: the same outputs to the bit as the originals, also
after a kill -9.
"""
import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rekindle as rk  # noqa: E402
import rekindle.torch  # noqa: E402
from rekindle.torch import conversion, modules  # noqa: E402
from transformers_models import NAMES, build, config, digest, outputs  # noqa: E402

from conftest import PATIENCE_S  # noqa: E402


@pytest.fixture(scope="module")
def agent(fleet):
    for name in NAMES:
        model = build(name)
        directory = fleet.directory / "checkpoints" / name
        model.save_pretrained(directory)
        fleet.publish(f"{name}@1", directory)
    return fleet.store("a")


def from_pretrained(*arguments, **options):
    """The model, its session closed."""
    model = rekindle.torch.from_pretrained(*arguments, **options)
    with rekindle.torch.session_of(model) as session:
        session.commit(timeout=PATIENCE_S)
    return model


@pytest.fixture
def recorded_only(monkeypatch):
    """Without the way around, which gives transformers real tensors."""
    def refuse(*arguments):
        raise AssertionError("not recorded")
    monkeypatch.setattr("rekindle.torch.pretrained._from_real", refuse)
    monkeypatch.setattr("rekindle.torch.conversion._fill_real", refuse)


@pytest.mark.parametrize("device", [None, "double:0"])
@pytest.mark.parametrize("name", NAMES)
def test_from_pretrained(agent, recorded_only, name, device):
    model = from_pretrained(name, device=device, agent=agent)
    original = build(name)
    assert type(model) is type(original)
    assert not model.training
    assert torch.equal(outputs(model), outputs(original))
    assert model.generation_config.max_length == 37
    for key, buffer in original.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_a_tensor_for_each_expert(agent, name):
    """So that the tests above do merge them, where this transformers keeps them in one."""
    with rk.attach(name, agent=agent) as session:
        names = [info.name for info in session.tensors()]
    experts = [n for n in names if n.endswith("experts.3.gate_proj.weight")]
    assert len(experts) == {"llama": 0, "qwen3_moe": 2, "deepseek_v3": 1}[name]


@pytest.mark.parametrize("device", [None, "double:1"])
@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_load_into_a_model_that_is_there(agent, recorded_only, name, where, device):
    with torch.device(where):
        model = transformers.AutoModelForCausalLM.from_config(config(name)).eval()
    with rekindle.torch.load(model, name, agent=agent, device=device) as session:
        session.commit(timeout=PATIENCE_S)
    assert torch.equal(outputs(model), outputs(build(name)))


def test_tied_weights_stay_tied(agent):
    model = from_pretrained("llama", agent=agent)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config("llama"))
    rekindle.torch.load(model, "llama", agent=agent).close()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", NAMES)
def test_another_dtype_is_what_transformers_makes_of_it(agent, fleet, recorded_only, name):
    model = from_pretrained(name, agent=agent, torch_dtype=torch.bfloat16)
    theirs = type(model).from_pretrained(fleet.directory / "checkpoints" / name,
                                         **conversion.spelled({"dtype": torch.bfloat16}))
    assert {k: v.dtype for k, v in model.state_dict().items()} == {
        k: v.dtype for k, v in theirs.state_dict().items()}
    assert torch.equal(outputs(model), outputs(theirs))


def test_a_device_map_and_a_class(agent):
    model = from_pretrained("llama", agent=agent, model_class=transformers.AutoModel,
                            device_map={"": "cpu"})
    assert type(model) is transformers.LlamaModel
    assert torch.equal(outputs(model), outputs(build("llama").model))


def test_the_way_around_gives_the_same(agent, monkeypatch):
    """What a converter does that is not followed is done by transformers, on real tensors."""
    monkeypatch.setattr(conversion, "record", lambda *a, **k: None)
    assert digest(from_pretrained("qwen3_moe", agent=agent)) == digest(build("qwen3_moe"))
    monkeypatch.setattr(modules, "_by_name", lambda model, catalog: ({}, ["everything"]))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config("qwen3_moe")).eval()
    rekindle.torch.load(model, "qwen3_moe", agent=agent).close()
    assert digest(model) == digest(build("qwen3_moe"))


@pytest.mark.parametrize("operation", [
    lambda t: t * 2, lambda t: t if t.sum().item() else t + 1, lambda t: torch.tensor(t.tolist())])
def test_a_converter_that_computes_is_not_followed(operation):
    class Kind(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, *arguments, state_dict, **more):
            state_dict = {k: operation(v) if "norm" in k else v for k, v in state_dict.items()}
            return super().from_pretrained(*arguments, state_dict=state_dict, **more)
    original = build("llama")
    catalog = {name: rekindle.recording.TensorMeta(tuple(t.shape), t.dtype)
               for name, t in original.state_dict().items() if name != "lm_head.weight"}
    assert conversion.record(Kind, original.config, catalog) is None
    assert conversion.record(transformers.LlamaForCausalLM, original.config, catalog) is not None


def test_a_checkpoint_with_a_gap(agent):
    state = {k: v for k, v in build("qwen3_moe").state_dict().items() if k != "lm_head.weight"}
    rk.publish(state, "gap@1", agent=agent)
    with pytest.raises(rk.NotFoundError, match="lm_head.weight"):
        rekindle.torch.from_pretrained("gap", agent=agent, config=config("qwen3_moe"),
                                       model_class=transformers.Qwen3MoeForCausalLM)
    with pytest.raises(rk.NotFoundError, match="lm_head.weight"):
        rekindle.torch.load(build("qwen3_moe"), "gap", agent=agent)
    model = build("qwen3_moe", seed=6)
    kept = model.lm_head.weight.clone()
    rekindle.torch.load(model, "gap", agent=agent, strict=False).close()
    assert torch.equal(model.lm_head.weight, kept)
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])


def test_the_real_model(fleet, real_model):
    fleet.publish("minilm@1", real_model)
    model = from_pretrained("minilm", agent=fleet.store("a"))
    original = transformers.AutoModel.from_pretrained(real_model).eval()
    assert type(model) is transformers.BertModel
    assert digest(model) == digest(original)


def test_it_says_what_it_lacks(agent):
    with pytest.raises(rk.NotFoundError):
        rekindle.torch.from_pretrained("nobody", agent=agent)
    with pytest.raises(rk.InvalidError, match="no shard"):
        rekindle.torch.from_pretrained("llama", agent=agent, shard="tp=0/2")
    with pytest.raises(rk.InvalidError, match="device_map"):
        rekindle.torch.from_pretrained("llama", agent=agent, device="double:0", device_map="cpu")
    with pytest.raises(rk.NotFoundError, match="from_pretrained"):
        rekindle.torch.session_of(build("llama"))


# A worker with a model. With `stop` it stops for ever when so many tensors have come to it.
WORKER = """
import sys, time
import rekindle, rekindle.torch
from transformers_models import digest
name, agent, device, stop = sys.argv[1:]
one_by_one = rekindle.Session.entries
def entries(session, *options):
    for count, entry in enumerate(one_by_one(session, *options), 1):
        yield entry
        if count == int(stop):
            print("loading", flush=True)
            time.sleep(3600)
def load_into(session, targets, **options):
    for info, tensor in session.entries():
        for target in targets[info.box]:
            target.copy_(tensor)
if int(stop):
    rekindle.Session.entries, rekindle.Session.load_into = entries, load_into
model = rekindle.torch.from_pretrained(name, agent=agent, device=device or None)
rekindle.torch.session_of(model).commit(timeout=60)
while True:
    print(digest(model), flush=True)
    if not sys.stdin.readline():
        break
"""


class Worker:
    def __init__(self, name, agent, device="", stop=0):
        here = os.path.dirname(os.path.abspath(__file__))
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([here, environment["PYTHONPATH"]])
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, name, str(agent), device, str(stop)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def says(self):
        return self.process.stdout.readline().strip()

    def ask(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.mark.parametrize("name,device", [
    ("llama", "double:0"), ("qwen3_moe", "double:1"), ("deepseek_v3", "")])
def test_killed_while_loading_and_while_serving(agent, name, device):
    expected = digest(build(name))
    workers = []

    def start(**how):
        workers.append(Worker(name, agent, **how))
        return workers[-1]
    try:
        loading = start(device=device, stop=7)
        assert loading.says() == "loading"
        loading.kill()
        serving = start(device=device)
        assert (serving.says(), serving.ask()) == (expected, expected)
        serving.kill()
        assert start(device=device).says() == expected
        assert [worker.process.poll() for worker in workers] == [-signal.SIGKILL] * 2 + [None]
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()
