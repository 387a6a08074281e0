"""Files of the safetensors package go through Rekindle and come out the same."""
import json
import pathlib
import struct

import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

NUMPY_TYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32",
               "uint16", "uint8", "bool"]


def arrays(seed):
    generator = numpy.random.default_rng(seed)
    result = {}
    for dtype in NUMPY_TYPES:
        shape = tuple(generator.integers(1, 40, size=generator.integers(1, 4)))
        raw = generator.integers(0, 2 if dtype == "bool" else 100, size=shape)
        result[f"{dtype}.tensor"] = raw.astype(dtype)
    result["scalar"] = numpy.array(3.5, dtype="float32")
    result["empty"] = numpy.zeros((0, 7), dtype="float32")
    result["large"] = generator.random((700, 1024), dtype="float32")  # several tiles
    return result


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].shape == right[name].shape, name
        assert left[name].tobytes() == right[name].tobytes(), name


@pytest.mark.parametrize("seed", range(3))
def test_numpy_arrays_of_every_dtype_survive(rekindle, tmp_path, seed):
    original = arrays(seed)
    safetensors.numpy.save_file(original, tmp_path / "model.safetensors")
    rekindle.publish(f"arrays@{seed}", tmp_path / "model.safetensors")
    rekindle.pull_to(f"arrays@{seed}", tmp_path / "out")
    same(safetensors.numpy.load_file(tmp_path / "out/model.safetensors"), original)


def test_bfloat16_survives_bit_for_bit(rekindle, tmp_path):
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)  # every pattern, NaNs too
    safetensors.torch.save_file({"w": bits.view(torch.bfloat16).reshape(256, 256)},
                                tmp_path / "m.safetensors")
    rekindle.publish("bf16@1", tmp_path / "m.safetensors")
    rekindle.pull_to("bf16@1", tmp_path / "out")
    pulled = safetensors.torch.load_file(tmp_path / "out/model.safetensors")["w"]
    assert torch.equal(pulled.view(torch.int16).flatten(), bits)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_eight_bit_floats_survive(rekindle, tmp_path, dtype):
    """Written by hand: the package makes no F8 tensors from numpy."""
    payload = bytes(range(256)) * 4
    header = json.dumps({"w": {"dtype": dtype, "shape": [4, 256], "data_offsets": [0, 1024]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + payload)
    name = dtype.lower()
    rekindle.publish(f"{name}@1", tmp_path / "m.safetensors")
    rekindle.pull_to(f"{name}@1", tmp_path / "out")
    data = (tmp_path / "out/model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8:8 + length])["w"]
    assert (entry["dtype"], entry["shape"]) == (dtype, [4, 256])
    begin, end = entry["data_offsets"]
    assert data[8 + length + begin:8 + length + end] == payload


def test_the_package_opens_the_files_of_a_store(rekindle, tmp_path):
    original = arrays(9)
    safetensors.numpy.save_file(original, tmp_path / "model.safetensors")
    published = rekindle.publish("stored@1", tmp_path / "model.safetensors")
    pulled = rekindle.run("pull", "stored@1", "--store", rekindle.store("b"))
    assert pulled["root"] == published["root"]
    from_store = {}
    for path in pathlib.Path(pulled["path"]).glob("*.safetensors"):
        from_store.update(safetensors.numpy.load_file(path))
    same(from_store, original)


def test_unicode_and_odd_names_survive(rekindle, tmp_path):
    original = {name: numpy.arange(3, dtype="float32") for name in
                ["gewöhnlich", "重み", "with space", "a\"quote", "back\\slash", "x" * 1000]}
    safetensors.numpy.save_file(original, tmp_path / "m.safetensors")
    rekindle.publish("names@1", tmp_path / "m.safetensors")
    rekindle.pull_to("names@1", tmp_path / "out")
    same(safetensors.numpy.load_file(tmp_path / "out/model.safetensors"), original)


def test_what_the_package_refuses_is_refused(rekindle, tmp_path):
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}'
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x" * 9)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load_file(tmp_path / "bad.safetensors")
    answer = rekindle.run("publish", "bad@1", tmp_path / "bad.safetensors", "--store",
                          rekindle.store("a"), code=2)
    assert "w" in answer["error"]["message"]
