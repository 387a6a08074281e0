"""Sessions in host memory."""
import gc
import json
import threading

import numpy
import pytest
import torch
from conftest import eventually, run_python

import rekindle
from rekindle import Box

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 1}
FILES = {"config.json": json.dumps(CONFIG).encode(), "sub/empty.txt": b""}


def weights():
    generator = torch.Generator().manual_seed(7)
    return {
        "model.embed_tokens.weight": torch.randn(96, 64, generator=generator),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(64, 64, generator=generator),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(64, 64, generator=generator),
        "model.norm.weight": torch.randn(64, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 7),
    }


@pytest.fixture(scope="module")
def published(fleet, store):
    rekindle.publish(weights(), "m@1", files=FILES, agent=store)
    return weights()


@pytest.fixture(scope="module")
def llama(fleet, store):
    """All that the family's shard spec knows."""
    layer = {"self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "mlp.gate_proj": (128, 64),
             "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128), "input_layernorm": (64,),
             "post_attention_layernorm": (64,)}
    known = {name: tensor for name, tensor in weights().items() if name.startswith("model.")}
    for name, shape in layer.items():
        known[f"model.layers.0.{name}.weight"] = torch.randn(shape)
    known["lm_head.weight"] = torch.randn(96, 64)
    rekindle.publish(known, "llama@1", files=FILES, agent=store)
    return known


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape, name
        assert torch.equal(left[name], right[name]), name


def test_everything_comes_once_and_as_it_was(published, store):
    with rekindle.attach("m", agent=store) as session:
        names = []
        found = {}
        for name, tensor in session:
            names.append(name)
            found[name] = tensor.clone()
        assert len(names) == len(set(names))
        same(found, published)
        assert list(session) == []
        session.commit(timeout=60)


def test_what_a_session_says_of_itself(published, store):
    with rekindle.attach("m", 1, agent=store) as session:
        assert (session.model, session.version, session.rung) == ("m", 1, "local")
        assert (session.device, session.device_path) == (None, "")
        assert session.tensor_count == len(published)
        files = sum(map(len, FILES.values()))
        assert session.bytes_total == sum(t.nbytes for t in published.values()) + files
        eventually(lambda: session.bytes_done == session.bytes_total)
        infos = {info.name: info for info in session.tensors()}
        assert infos["model.norm.weight"] == ("model.norm.weight", "BF16", (64,), (0,), (64,), 128)
        assert infos["scalar"].shape == () and infos["nothing"].nbytes == 0
        assert "m@1" in repr(session)


def test_files_come_beside_the_tensors_at_any_time(published, store):
    with rekindle.attach("m", agent=store) as session:
        assert session.files == FILES
        assert list(session.files) == sorted(FILES)
        assert not any("config" in name for name, _ in session)


def test_a_loop_goes_on_where_another_was_left(published, store):
    with rekindle.attach("m", agent=store) as session:
        first = [name for name, _ in zip(range(0, 2), session)]
        names = []
        for name, _ in session:
            names.append(name)
            break
        names += [name for bucket in session.buckets() for name, _ in bucket]
        assert len(first) == 2 and len(names) == len(set(names)) >= len(published) - 3


def test_views_stay_whole_after_close_and_the_agent_sees_the_end_with_the_last(published, fleet,
                                                                               store):
    def is_attached():
        instances = fleet.run("status", "--store", store)["instances"]
        return any(one["instance"] == "kept" and one["sessions"] for one in instances)

    session = rekindle.attach("m", instance="kept", agent=store)
    kept = dict(session)["model.embed_tokens.weight"]
    session.close()
    session.close()
    assert session.closed and "closed" in repr(session)
    with pytest.raises(rekindle.StaleError, match="closed"):
        next(iter(session))
    with pytest.raises(rekindle.StaleError):
        session.commit()
    gc.collect()
    assert torch.equal(kept, published["model.embed_tokens.weight"])
    assert is_attached()
    part = kept[3:5]
    del kept
    assert torch.equal(part, published["model.embed_tokens.weight"][3:5])
    del part
    eventually(lambda: not is_attached())


def test_a_view_of_the_host_map_has_a_storage_of_its_own(published, store):
    with rekindle.attach("m", agent=store) as session:
        for _, tensor in session:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_closing_ends_the_wait_of_another_thread(published, store):
    session = rekindle.attach("m", agent=store)
    ended = []

    def wait():
        try:
            session.wait_for_update()
        except rekindle.StaleError as why:
            ended.append(why)

    thread = threading.Thread(target=wait)
    thread.start()
    session.close()
    thread.join(60)
    assert len(ended) == 1


def test_a_shard_is_this_ranks_part(llama, store):
    published = llama
    for rank in range(2):
        with rekindle.attach("llama", shard=f"tp={rank}/2", agent=store) as session:
            parts = {info.name: (info, tensor.clone()) for info, tensor in session.entries()}
            assert session.files == FILES
        info, q = parts["model.layers.0.self_attn.q_proj.weight"]
        assert (info.shape, info.offset, info.full_shape) == ((32, 64), (32 * rank, 0), (64, 64))
        assert torch.equal(q, published[info.name][32 * rank:32 * rank + 32])
        info, o = parts["model.layers.0.self_attn.o_proj.weight"]
        assert torch.equal(o, published[info.name][:, 32 * rank:32 * rank + 32])
        assert torch.equal(parts["model.norm.weight"][1], published["model.norm.weight"])


@pytest.mark.parametrize("form", ["dict", "text", "path"])
def test_a_spec_of_ones_own_says_how_to_cut(published, store, tmp_path, form):
    rules = {"name": "mine", "rules": [
        {"match": "model.embed_tokens.weight", "kind": "split", "dim": 1},
        {"match": "**", "kind": "replicate"}]}
    (tmp_path / "spec.json").write_text(json.dumps(rules))
    spec = {"dict": rules, "text": json.dumps(rules), "path": tmp_path / "spec.json"}[form]
    with rekindle.attach("m", shard="tp=1/4", spec=spec, agent=store) as session:
        found = dict(session)
    name = "model.embed_tokens.weight"
    assert torch.equal(found[name], published[name][:, 16:32])
    assert found["scalar"] == 3.5 and found["nothing"].shape == (0, 7)


def test_boxes_are_exactly_what_was_asked_for(published, store):
    name = "model.embed_tokens.weight"
    asked = [Box(name, (0, 8), (16, 8)), Box(name, (90, 0), (6, 64)), "model.norm.weight"]
    with rekindle.attach("m", shard=asked, agent=store) as session:
        found = {info.box: tensor for info, tensor in session.entries(timeout=60)}
        assert session.files == {}
    norm = Box("model.norm.weight", (0,), (64,))
    assert found.keys() == {*asked[:2], norm}
    assert torch.equal(found[asked[0]], published[name][:16, 8:16])
    assert torch.equal(found[asked[1]], published[name][90:])
    assert torch.equal(found[norm], published["model.norm.weight"])


@pytest.mark.parametrize("box, error, said", [
    (Box("absent"), rekindle.NotFoundError, "absent"),
    (Box("scalar", (0,), (1,)), rekindle.InvalidError, "scalar"),
    (Box("model.norm.weight", (60,), (5,)), rekindle.InvalidError, "model.norm.weight"),
    (Box("model.norm.weight", (0,), ()), rekindle.InvalidError, "1 offsets, 0 extents"),
    (Box("model.norm.weight", (-1,), (4,)), rekindle.InvalidError, "negative"),
    (Box("model.norm.weight", (0.5,), (4,)), rekindle.InvalidError, "integers"),
    (Box("nul\0inside"), rekindle.InvalidError, "NUL")])
def test_boxes_that_are_wrong_are_named(published, store, box, error, said):
    with pytest.raises(error, match=said):
        rekindle.attach("m", shard=[box], agent=store)


def test_arguments_that_are_wrong_are_named(published, store, tmp_path):
    with pytest.raises(rekindle.InvalidError, match="which model"):
        rekindle.attach(agent=store)
    with pytest.raises(rekindle.InvalidError, match="rank 2 of 2"):
        rekindle.attach("m", instance="i", rank=2, world=2, agent=store)
    with pytest.raises(rekindle.InvalidError, match="no boxes"):
        rekindle.attach("m", shard=[], agent=store)
    with pytest.raises(rekindle.InvalidError, match="'tpu:0' is no device"):
        rekindle.attach("m", device="tpu:0", agent=store)
    with pytest.raises(rekindle.InvalidError, match="is no stream"):
        rekindle.attach("m", device="double:0", stream="fast", agent=store)
    with pytest.raises(rekindle.InvalidError, match="time-out"):
        rekindle.attach("m", timeout=-1, agent=store)
    with pytest.raises(rekindle.NotFoundError, match="m@77"):
        rekindle.attach("m", 77, agent=store)
    with pytest.raises(rekindle.UnavailableError):
        rekindle.attach("m", agent=tmp_path / "nobody", timeout=0.1)


def test_load_into_copies_converts_and_says_what_does_not_fit(published, store):
    def target():
        return {name: torch.full_like(tensor, 9) for name, tensor in published.items()}

    with rekindle.attach("m", agent=store) as session:
        plain = target()
        assert session.load_into(plain) == ([], [])
        same(plain, published)
        session.commit(timeout=60)
    with rekindle.attach("m", agent=store) as session:
        odd = target()
        odd["model.norm.weight"] = torch.zeros(64, dtype=torch.float32)
        odd["model.embed_tokens.weight"] = torch.zeros(64, 96).t()
        odd["scalar"] = numpy.zeros((), dtype="float32")
        session.load_into(odd)
        assert torch.equal(odd["model.norm.weight"], published["model.norm.weight"].float())
        assert torch.equal(odd["model.embed_tokens.weight"], published["model.embed_tokens.weight"])
        assert odd["scalar"] == 3.5
    with rekindle.attach("m", agent=store) as session:
        few = {"model.norm.weight": torch.zeros(64).bfloat16(), "absent": torch.zeros(1)}
        with pytest.raises(rekindle.NotFoundError, match="'absent'"):
            session.load_into(few)
        del few["absent"]
        with pytest.raises(rekindle.NotFoundError, match="and 4 more of m@1 has no target"):
            session.load_into(few)
        assert not few["model.norm.weight"].any()
        few["absent"] = torch.zeros(1)
        result = session.load_into(few, strict=False)
        assert result.missing == ["'absent'"] and len(result.unexpected) == 5
        assert torch.equal(few["model.norm.weight"], published["model.norm.weight"])
    with rekindle.attach("m", agent=store) as session:
        with pytest.raises(rekindle.InvalidError, match=r"has shape \[64\], its target \[32, 2\]"):
            session.load_into({**target(), "model.norm.weight": torch.zeros(32, 2).bfloat16()})
        with pytest.raises(rekindle.InvalidError, match="meta device"):
            session.load_into({**target(), "scalar": torch.zeros((), device="meta")})
        with pytest.raises(rekindle.InvalidError, match="not a tensor"):
            session.load_into({**target(), "scalar": 3.5})
        list(session)
        with pytest.raises(rekindle.InvalidError, match="taken from the session before"):
            session.load_into(target())


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(96, 64)
        self.head = torch.nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(64)


@pytest.mark.parametrize("device", [None, "double:0"])
def test_tied_parameters_of_a_module_need_one_name(fleet, store, device):
    torch.manual_seed(3)
    trained, version = Tied(), 1 if device is None else 2
    state = trained.state_dict()
    del state["head.weight"]
    rekindle.publish(state, f"tied@{version}", agent=store)
    fresh = Tied()
    with rekindle.attach("tied", version, device=device, agent=store) as session:
        session.load_into(fresh)
        session.commit(timeout=60)
    assert fresh.head.weight is fresh.embed.weight and fresh.embed.weight.requires_grad
    same(dict(fresh.state_dict()), dict(trained.state_dict()))


def test_one_tensor_may_go_to_several_places(published, store):
    for device in (None, "double:0"):
        with rekindle.attach("m", shard=["model.norm.weight"], device=device,
                             agent=store) as session:
            places = [torch.zeros(64).bfloat16(), torch.zeros(64), torch.zeros(64).bfloat16()]
            session.load_into({"model.norm.weight": places})
        for place in places:
            assert torch.equal(place, published["model.norm.weight"].to(place.dtype))


def test_two_ranks_commit_together(llama, store):
    sessions = [rekindle.attach("llama", shard=f"tp={rank}/2", instance="pair", rank=rank, world=2,
                                agent=store) for rank in range(2)]
    for session in sessions:
        with pytest.raises(rekindle.InvalidError, match="have not been taken"):
            session.loaded()
        list(session)
    with pytest.raises(rekindle.TimeoutError):
        sessions[0].commit(timeout=0)
    sessions[1].commit(timeout=60)
    sessions[0].commit(timeout=60)
    for session in sessions:
        session.close()


def test_a_newer_version_ends_the_wait(published, store):
    rekindle.publish({"w": torch.zeros(4)}, "moving@1", agent=store)
    with rekindle.attach("moving", agent=store) as session:
        assert session.wait_for_update(timeout=0) is None
        rekindle.publish({"w": torch.ones(4)}, "moving@2", agent=store)
        assert session.wait_for_update(timeout=60) == 2
    with rekindle.attach("moving", agent=store) as session:
        assert session.version == 2 and torch.equal(dict(session)["w"], torch.ones(4))


def test_what_rekindle_run_sets_is_what_is_attached_to(llama, store):
    code = """
import sys, rekindle
with rekindle.attach() as session:
    w = {info.name: info for info, _ in session.entries()}
    session.commit(timeout=60)
    print(session.model, session.version, w["model.layers.0.self_attn.q_proj.weight"].offset[0])
"""
    said = run_python(code, REKINDLE_MODEL="llama@1", REKINDLE_SHARD="tp=1/2",
                      REKINDLE_STORE=str(store), REKINDLE_INSTANCE="by-run",
                      REKINDLE_GENERATION="4", REKINDLE_WORLD="1")
    assert said.split() == ["llama", "1", "32"]
    done = run_python(code, check=False, REKINDLE_MODEL="llama", REKINDLE_RANK="first",
                      REKINDLE_STORE=str(store))
    assert "REKINDLE_RANK=first is not a number" in done.stderr


NUMPY = """
import sys; sys.modules["torch"] = None
import rekindle, numpy
with rekindle.attach("m", agent=sys.argv[1]) as session:
    found = dict(session)
embed = found["model.embed_tokens.weight"]
assert embed.dtype == numpy.float32 and embed.shape == (96, 64) and not embed.flags.writeable
assert found["nothing"].shape == (0, 7) and found["scalar"] == 3.5
norm = found["model.norm.weight"]
assert norm.dtype.itemsize == 2 and norm.shape == (64,)
target = {"model.norm.weight": numpy.zeros(64, "uint16")}
with rekindle.attach("m", shard=["model.norm.weight"], agent=sys.argv[1]) as session:
    session.load_into(target)
assert target["model.norm.weight"].tobytes() == norm.tobytes()
try:
    next(iter(rekindle.attach("m", device="double:0", agent=sys.argv[1])))
except rekindle.UnavailableError as why:
    assert "torch" in str(why)
else:
    sys.exit("tensors on a device without torch")
print(norm.tobytes().hex(), embed.tobytes().hex()[:64])
"""


def test_numpy_arrays_where_there_is_no_torch(published, store):
    norm, embed = run_python(NUMPY, store).split()
    assert norm == published["model.norm.weight"].view(torch.uint8).numpy().tobytes().hex()
    assert embed == published["model.embed_tokens.weight"].numpy().tobytes().hex()[:64]


def test_neither_torch_nor_numpy_is_said_and_files_come_all_the_same(published, store):
    said = run_python("""
import sys; sys.modules["torch"] = sys.modules["numpy"] = None
import json, rekindle
with rekindle.attach("m", agent=sys.argv[1]) as session:
    try:
        next(iter(session))
    except rekindle.UnavailableError as why:
        print(json.dumps([str(why), session.tensor_count, session.files["config.json"].decode()]))
""", store)
    why, count, config = json.loads(said)
    assert "neither torch nor numpy" in why and count == 6
    assert config == FILES["config.json"].decode()
