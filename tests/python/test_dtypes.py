"""Every dtype of torch and numpy, published and loaded: its bits come back, or one line says why."""
import numpy
import pytest
import torch

import rekindle
from rekindle import dtypes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of experimental dtypes
KEPT = {name: dtypes.torch_dtype(name) for name in (
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32",
    "F32", "I64", "U64", "F64")}
ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
REFUSED = [dtype for dtype in ALL if dtype not in KEPT.values()]
NUMPY_KEPT = [numpy.dtype(name) for name in (
    "bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", ">f4", ">i2")]
NUMPY_REFUSED = [numpy.dtype(name) for name in (
    "c8", "c16", "g", "O", "U3", "S3", "V2", "M8[s]", "m8[s]", [("a", "f4")])]


def empty(dtype):
    """As empty as it can be made: of packed and quantized ones nothing else can."""
    return torch.empty(8, dtype=dtype)


@pytest.fixture(scope="module")
def numbers(fleet, store):
    rekindle.publish({"w": torch.arange(8.0)}, "f32@1", agent=store)
    rekindle.publish({"w": torch.arange(8.0).bfloat16()}, "bf16@1", agent=store)


def loaded(model, store, target, device=None):
    with rekindle.attach(model, agent=store, device=device) as session:
        session.load_into({"w": target})
    return target


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("device", [None, "double:0"])
def test_what_is_kept_comes_back_bit_for_bit(fleet, store, name, device):
    count = 8 * dtypes.itemsize(name)
    raw = torch.arange(count, dtype=torch.uint8) % 2 if name == "BOOL" else torch.arange(
        count, dtype=torch.uint8) * 29
    model = f"kept-{name.lower()}-{'host' if device is None else 'device'}"
    rekindle.publish({"w": raw.view(KEPT[name])}, f"{model}@1", agent=store)
    target = loaded(model, store, torch.zeros(count, dtype=torch.uint8).view(KEPT[name]), device)
    assert torch.equal(target.view(torch.uint8), raw)


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_publishing_another_dtype_names_the_tensor_and_says_why(fleet, store, dtype):
    if dtype is torch.float4_e2m1fn_x2:
        said = "'w': dtype F4 has elements smaller than a byte"
    elif str(dtype).startswith(("torch.qint", "torch.quint")):
        said = f"'w' is quantized by torch .{dtype}."
    else:
        said = f"'w': {dtype} is not a dtype that Rekindle keeps: .* F32"
    with pytest.raises(rekindle.InvalidError, match=said):
        rekindle.publish({"w": empty(dtype)}, "refused@1", agent=store)


def converts(dtype):
    return dtype.is_complex or dtype.is_floating_point and dtype.itemsize == 1 and (
        dtype is not torch.float4_e2m1fn_x2)


@pytest.mark.parametrize("dtype", [dtype for dtype in REFUSED if not converts(dtype)], ids=str)
@pytest.mark.parametrize("device", [None, "double:0"])
def test_a_target_that_torch_does_not_convert_to_is_said_before_anything_is_written(
        numbers, store, dtype, device):
    targets = {"w": [torch.full((8,), 7.0), empty(dtype)]}
    with rekindle.attach("f32", agent=store, device=device) as session:
        with pytest.raises(rekindle.InvalidError, match=f"'w' is F32, its target {dtype}"):
            session.load_into(targets)
    assert torch.equal(targets["w"][0], torch.full((8,), 7.0))


@pytest.mark.parametrize("dtype", [dtype for dtype in REFUSED if converts(dtype)], ids=str)
def test_targets_of_other_dtypes_are_converted_to(numbers, store, dtype):
    target = loaded("f32", store, torch.zeros(8, dtype=dtype))
    assert torch.equal(target.to(torch.complex64).real, torch.arange(8.0))


@pytest.mark.parametrize("dtype", NUMPY_KEPT, ids=str)
def test_arrays_come_back(fleet, store, dtype):
    array = (numpy.arange(8) % 2).astype(dtype)
    model = f"numpy-{dtype.name}-{'swapped' if not dtype.isnative else 'native'}"
    rekindle.publish({"w": array}, f"{model}@1", agent=store)
    assert (loaded(model, store, numpy.zeros(8, dtype)) == array).all()


@pytest.mark.parametrize("dtype", NUMPY_REFUSED, ids=str)
def test_other_arrays_are_refused_by_name(fleet, store, dtype):
    with pytest.raises(rekindle.InvalidError, match="'w': numpy's .* is not a dtype that Rekindle"):
        rekindle.publish({"w": numpy.zeros(8, dtype)}, "refused@1", agent=store)


@pytest.mark.parametrize("dtype", NUMPY_REFUSED, ids=str)
def test_arrays_are_converted_to_where_they_hold_numbers(numbers, store, dtype):
    target = numpy.zeros(8, dtype)
    if dtype.kind in "cf":
        assert (loaded("f32", store, target) == numpy.arange(8)).all()
        return
    with pytest.raises(rekindle.InvalidError, match="'w' is F32, which does not convert to"):
        loaded("f32", store, target)


def test_numbers_that_numpy_lacks_are_converted_by_torch(numbers, store):
    for dtype in ("f4", "f2", "f8", "i4", "c8"):
        assert (loaded("bf16", store, numpy.zeros(8, dtype)) == numpy.arange(8)).all()


@pytest.mark.parametrize("dtype", ["u2", "V2"])
def test_their_bits_go_into_unsigned_and_opaque_elements(numbers, store, dtype):
    expected = torch.arange(8.0).bfloat16().view(torch.uint8).numpy().tobytes()
    assert loaded("bf16", store, numpy.zeros(8, dtype)).tobytes() == expected


def test_arrays_of_ml_dtypes_take_what_comes_from_torch(numbers, store):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
        for model in ("f32", "bf16"):
            target = loaded(model, store, numpy.zeros(8, dtype))
            assert target.tolist() == numpy.arange(8).astype(dtype).tolist()
    rekindle.publish({"w": numpy.arange(8).astype(ml_dtypes.bfloat16)}, "ml@1", agent=store)
    assert torch.equal(loaded("ml", store, torch.zeros(8)), torch.arange(8.0))


def test_strides_and_directions_of_arrays_are_kept(numbers, store):
    memory = numpy.zeros((8, 2), "f4")
    loaded("f32", store, memory[::-1, 1])
    assert (memory[::-1, 1] == numpy.arange(8)).all() and not memory[:, 0].any()
