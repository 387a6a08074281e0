"""From memory into segments and back, bit for bit."""
import os

import numpy
import pytest
import torch
from safetensors.torch import save_file
from stand_in import StandIn

import rekindle
from rekindle import dtypes

LIBRARY_DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "U16", "F16", "BF16",
                  "I32", "U32", "F32", "I64", "U64", "F64"]


def patterns(name):
    """Every byte there is, in that dtype: NaNs, denormals and all."""
    if name == "BOOL":
        return torch.tensor([True, False, True, True] * 64)
    raw = torch.arange(256 * dtypes.itemsize(name), dtype=torch.int64) * 37 % 256
    return raw.to(torch.uint8).view(dtypes.torch_dtype(name))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.shape


def same_bits(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    if left.numel():
        assert torch.equal(bits(left), bits(right))


@pytest.mark.parametrize("device", [None, "double:0"])
def test_every_dtype_of_torch_survives(fleet, store, device):
    known = {name: patterns(name).reshape(4, -1) for name in LIBRARY_DTYPES}
    version = 1 if device is None else 2
    said = rekindle.publish(known, f"all@{version}", agent=store)
    assert said == ("all", version, len(known), sum(t.nbytes for t in known.values()))
    with rekindle.attach("all", version, device=device, agent=store) as session:
        found = {name: tensor.clone() for name, tensor in session}
    assert found.keys() == known.keys()
    for name in known:
        same_bits(found[name], known[name])


def test_numpy_arrays_survive(fleet, store):
    known = {name: patterns(name).reshape(-1, 4) for name in LIBRARY_DTYPES
             if dtypes.numpy_dtype(name).isbuiltin == 1 and dtypes.numpy_dtype(name).kind != "V"}
    assert len(known) >= 12
    arrays = {name: tensor.numpy() for name, tensor in known.items()}
    arrays["strided"] = numpy.arange(24, dtype="float32").reshape(4, 6)[::2, 1::2]
    known["strided"] = torch.from_numpy(arrays["strided"].copy())
    rekindle.publish(arrays, "arrays@1", agent=store)
    with rekindle.attach("arrays", agent=store) as session:
        found = dict(session)
    assert found.keys() == known.keys()
    for name in known:
        same_bits(found[name], known[name])


def test_shapes_that_are_odd_survive(fleet, store):
    whole = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    known = {"scalar": torch.tensor(7, dtype=torch.int64), "empty": torch.zeros(3, 0, 2),
             "transposed": whole.permute(3, 1, 0, 2), "every-second": whole[..., ::2],
             "expanded": torch.ones(1, 4).expand(5, 4), "one": torch.ones(1).bfloat16(),
             "gewöhnlich 重み": torch.ones(2), "parameter": torch.nn.Parameter(torch.ones(3))}
    rekindle.publish(known, "odd@1", agent=store)
    with rekindle.attach("odd", agent=store) as session:
        found = dict(session)
    assert found.keys() == known.keys()
    for name in known:
        same_bits(found[name], known[name].detach())


def test_a_module_and_its_files_are_published_as_they_are(fleet, store):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    rekindle.publish(module, "module@1", files={"config.json": b"{}"}, agent=store)
    with rekindle.attach("module", agent=store) as session:
        assert session.files == {"config.json": b"{}"}
        found = dict(session)
    for name, tensor in module.state_dict().items():
        same_bits(found[name], tensor)


def test_paths_are_published_by_the_command(fleet, store, tmp_path):
    known = {"a": torch.randn(3, 3), "b": torch.ones(2).bfloat16()}
    save_file(known, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b'{"x": 1}')
    said = rekindle.publish(tmp_path, "path@1", agent=store)
    assert said[:3] == ("path", 1, 2)
    assert rekindle.publish([tmp_path / "model.safetensors"], "path@2", agent=store).version == 2
    with rekindle.attach("path", 1, agent=store) as session:
        assert session.files["config.json"] == b'{"x": 1}'
        for name, tensor in session:
            same_bits(tensor, known[name])
    with pytest.raises(rekindle.NotFoundError, match="absent"):
        rekindle.publish(tmp_path / "absent", "path@3", agent=store)
    with pytest.raises(rekindle.InvalidError, match="beside tensors"):
        rekindle.publish(tmp_path, "path@3", files={"x": b""}, agent=store)


def test_the_same_bytes_again_are_fine_and_others_are_denied(fleet, store):
    rekindle.publish({"w": torch.zeros(4)}, "fixed@1", agent=store)
    rekindle.publish({"w": torch.zeros(4)}, "fixed@1", agent=store)
    with pytest.raises(rekindle.DeniedError, match="fixed@1"):
        rekindle.publish({"w": torch.ones(4)}, "fixed@1", agent=store)
    with rekindle.attach("fixed", agent=store) as session:
        assert not dict(session)["w"].any()


@pytest.mark.parametrize("source, said", [
    ({}, "without a tensor"), ({"w": 3}, "'w' is a int"), (7, "publish a int"),
    ({"w": torch.zeros(2, device="meta")}, "meta device"),
    ({"w": torch.eye(3).to_sparse()}, "'w' is not a dense tensor"),
    ({"w": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
    ({"w": numpy.array(["x"])}, "'w': numpy's <U1"),
    ({"__rekindle_file__/evil.py": torch.zeros(1)}, "kept for small files"),
    ({"n\0": torch.zeros(1)}, "NUL")])
def test_what_cannot_be_published_is_named(fleet, store, source, said):
    with pytest.raises(rekindle.InvalidError, match=said):
        rekindle.publish(source, "wrong@1", agent=store)


def test_a_version_is_a_number(fleet, store):
    for name in ("wrong", "wrong@", "wrong@x"):
        with pytest.raises(rekindle.InvalidError):
            rekindle.publish({"w": torch.zeros(1)}, name, agent=store)


class _Fails(torch.Tensor):
    """Whose bytes cannot be had, as of a GPU that was lost."""

    def detach(self):
        raise RuntimeError("lost")


def test_what_fails_in_the_middle_leaves_nothing_behind(fleet, store):
    def held():
        return {one["model"] for one in fleet.run("status", "--store", store)["holdings"]}

    broken = {"a": torch.ones(1000), "b": torch.ones(10).as_subclass(_Fails)}
    with pytest.raises(RuntimeError, match="lost"):
        rekindle.publish(broken, "broken@1", agent=store)
    assert "broken" not in held()
    with pytest.raises(rekindle.NotFoundError):
        rekindle.attach("broken", agent=store)
    rekindle.publish({"a": torch.ones(1000), "b": torch.ones(10)}, "broken@1", agent=store)
    assert "broken" in held()


def test_pull_and_status_say_what_the_command_says(fleet, store, tmp_path):
    known = {"a": torch.randn(8, 8), "b": torch.randn(3)}
    rekindle.publish(known, "pulled@1", agent=store)
    other = fleet.store("b")
    said = rekindle.pull("pulled", agent=other, coordinator=fleet.coordinator)
    assert (said["model"], said["version"], said["tensors"]) == ("pulled", 1, 2)
    held = rekindle.status(agent=other)["holdings"]
    assert any(one["model"] == "pulled" and one["complete"] for one in held)
    assert len(rekindle.status(coordinator=fleet.coordinator)["nodes"]) == 2
    planned = rekindle.pull("pulled", 1, to=tmp_path / "x", tensors="^a$", dry_run=True,
                            coordinator=fleet.coordinator)
    assert planned["tensors"] == 1 and not (tmp_path / "x").exists()
    rekindle.pull("pulled@1", to=tmp_path / "x", coordinator=fleet.coordinator)
    assert os.path.isfile(tmp_path / "x/model.safetensors")
    with pytest.raises(rekindle.NotFoundError, match="pulled@9"):
        rekindle.pull("pulled", 9, agent=other, coordinator=fleet.coordinator)
    with pytest.raises(rekindle.InvalidError, match="path of a file"):
        rekindle.pull("pulled", spec={"name": "x"}, agent=other)


def test_arrays_of_the_other_byte_order_are_published_as_numbers(fleet, store):
    array = numpy.arange(6, dtype=">f4").reshape(2, 3)
    rekindle.publish({"w": array}, "swapped@1", agent=store)
    with rekindle.attach("swapped", agent=store) as session:
        assert torch.equal(dict(session)["w"], torch.arange(6.0).reshape(2, 3))


def test_a_tensor_that_stands_for_others_is_refused(fleet, store):
    with pytest.raises(rekindle.InvalidError, match="'w' is a StandIn, which has no memory"):
        rekindle.publish({"w": StandIn(torch.zeros(2))}, "stand-in@1", agent=store)
