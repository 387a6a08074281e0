"""FP8 by blocks, against a loop over blocks and elements that shares no code with it."""
import math

import pytest

torch = pytest.importorskip("torch")

import rekindle  # noqa: E402
from rekindle.torch import cast, fp8_blocks, parts_of  # noqa: E402
from rekindle.torch.fp8 import DEEPSEEK_V3  # noqa: E402
from torch_parts import assembled, assert_same, read  # noqa: E402


def f32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def e4m3(value):
    """The byte of a number in E4M3: to nearest, ties to even. For |value| up to 464."""
    sign, value = (0x80 if math.copysign(1, value) < 0 else 0), abs(value)
    exponent = max(math.frexp(value)[1] - 1, -6) if value else -6
    # Python rounds ties to even.
    steps = round(value / 2.0 ** (exponent - 3))
    code = steps if exponent == -6 else ((exponent + 7) << 3) + steps - 8
    if exponent == -6 and steps >= 8:
        code = steps
    return sign | code


def reference(weight):
    """The published recipe, block by block and element by element."""
    rows, columns = weight.shape
    codes = torch.zeros((rows, columns), dtype=torch.uint8)
    scales = torch.zeros((math.ceil(rows / 128), math.ceil(columns / 128)))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * 128:(i + 1) * 128, j * 128:(j + 1) * 128].float().tolist()
            amax = max(abs(value) for row in block for value in row)
            # FP64 division of FP32 numbers, rounded to FP32, is the correctly rounded quotient.
            scale = f32(f32(max(amax, f32(1e-10))) / 448.0)
            scales[i, j] = scale
            for r, row in enumerate(block):
                quotients = torch.tensor([value / scale for value in row], dtype=torch.float32)
                for c, value in enumerate(quotients.tolist()):
                    codes[i * 128 + r, j * 128 + c] = e4m3(value)
    return codes.view(torch.float8_e4m3fn), scales


def weights(shape, dtype=torch.bfloat16, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return made.to(dtype)


def test_the_reference_knows_all_of_e4m3():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert [e4m3(value) for value in values.tolist()] == codes.tolist()
    middles = ((values[:-1] + values[1:]) / 2)[values[:-1].sign() == values[1:].sign()]
    assert [e4m3(value) for value in middles.tolist()] == middles.to(
        torch.float8_e4m3fn).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (1, 1), (100, 257)], ids=str)
def test_codes_and_scales_are_those_of_the_recipe_bit_for_bit(shape, dtype):
    weight = weights(shape, dtype)
    weight[0, 0] = 1.5
    found = assembled(read(parts_of({"a.o_proj.weight": weight}, convert=fp8_blocks())))
    codes, scales = reference(weight)
    assert_same(found, {"a.o_proj.weight": codes, "a.o_proj.weight_scale_inv": scales})


def test_values_are_divided_by_the_scale_and_not_multiplied_by_its_reciprocal():
    weight = weights((512, 512), seed=3)
    codes, scales = reference(weight)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    multiplied = (weight.float() * (1 / spread)).to(torch.float8_e4m3fn)
    assert (multiplied.view(torch.uint8) != codes.view(torch.uint8)).any(), "the test shows nothing"
    found = assembled(read(parts_of({"a.o_proj.weight": weight}, convert=fp8_blocks())))
    assert_same(found, {"a.o_proj.weight": codes, "a.o_proj.weight_scale_inv": scales})


def test_a_block_of_zeros_stays_zero():
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    weight[3, 200] = -2.0
    found = assembled(read(parts_of({"a.o_proj.weight": weight}, convert=fp8_blocks())))
    values, scales = found["a.o_proj.weight"].float(), found["a.o_proj.weight_scale_inv"]
    assert not values[:, :128].any() and values[3, 200] == -448 and torch.isfinite(scales).all()
    assert scales[0, 0] == torch.tensor(1e-10) / 448
    assert_same(found, dict(zip(found, reference(weight))))


def test_large_tensors_are_converted_in_strips_with_the_same_result(monkeypatch):
    weight = weights((700, 300))
    expected = [part[-1] for part in read(parts_of({"a.o_proj.weight": weight},
                                                   convert=fp8_blocks()))]
    monkeypatch.setattr("rekindle.torch.fp8._STRIP_ELEMENTS", 300 * 256)
    found = [part[-1] for part in read(parts_of({"a.o_proj.weight": weight},
                                                convert=fp8_blocks()))]
    for one, other in zip(found, expected):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_shards_at_block_borders_give_the_same_as_the_whole():
    weight, parts = weights((300, 400)), []
    for rows in ((0, 128), (128, 300)):
        for columns in ((0, 256), (256, 400)):
            mine = weight[slice(*rows), slice(*columns)]
            parts += read(parts_of({"a.q_proj.weight": mine}, convert=fp8_blocks(), layout={
                "a.q_proj.weight": ((300, 400), (rows[0], columns[0]))}))
    codes, scales = reference(weight)
    assert_same(assembled(parts), {"a.q_proj.weight": codes, "a.q_proj.weight_scale_inv": scales})


@pytest.mark.parametrize(("offset", "extent", "said"), [
    ((100, 0), (200, 400), "cut at row 100"), ((0, 0), (130, 400), "cut at row 130"),
    ((0, 64), (300, 336), "cut at column 64")], ids=str)
def test_a_border_inside_a_block_is_refused_in_one_line(offset, extent, said):
    with pytest.raises(rekindle.InvalidError, match=f"'a.q_proj.weight' is {said}, inside") as why:
        parts_of({"a.q_proj.weight": torch.zeros(extent)}, convert=fp8_blocks(),
                 layout={"a.q_proj.weight": ((300, 400), offset)})
    assert "shard it at multiples of 128" in str(why.value) and "\n" not in str(why.value)


@pytest.mark.parametrize(("tensor", "said"), [
    (torch.zeros(2, 3, 4), "has 3 dimensions"),
    (torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "is F8_E4M3, which is not quantized")])
def test_other_tensors_are_refused_if_selected(tensor, said):
    with pytest.raises(rekindle.InvalidError, match=f"'w' {said}"):
        parts_of({"w": tensor}, convert=fp8_blocks(".*"))


def test_only_selected_tensors_change():
    state = {"model.layers.0.mlp.down_proj.weight": weights((128, 128)),
             "model.layers.0.mlp.gate.weight": weights((4, 128)),
             "model.layers.0.mlp.experts.3.up_proj.weight": weights((128, 128)),
             "model.embed_tokens.weight": weights((8, 128))}
    names = [(part.name, part.dtype) for part in parts_of(state, convert=fp8_blocks())]
    assert names == [
        ("model.layers.0.mlp.down_proj.weight", "F8_E4M3"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "F32"),
        ("model.layers.0.mlp.gate.weight", "BF16"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "F8_E4M3"),
        ("model.layers.0.mlp.experts.3.up_proj.weight_scale_inv", "F32"),
        ("model.embed_tokens.weight", "BF16")]
    assert DEEPSEEK_V3.endswith(r"\.weight")


def test_the_weight_is_read_once_and_late():
    reads = []

    class Counted:
        def __call__(self, part):
            return [part._replace(read=lambda: reads.append(part.name) or part.read())]
    parts = parts_of({"a.o_proj.weight": weights((128, 128))}, convert=[Counted(), fp8_blocks()])
    assert reads == []
    for part in parts:
        part.read()
    assert reads == ["a.o_proj.weight"]


def test_casts_come_before_the_quantization():
    weight = weights((128, 130), torch.float32)
    state = {"a.o_proj.weight": weight, "a.norm.weight": weight[0], "steps": torch.tensor(3),
             "a.bias_correction": weight[1]}
    converts = [cast("BF16", r"(?!.*bias_correction$).*"), fp8_blocks()]
    codes, scales = reference(weight.bfloat16())
    assert_same(assembled(read(parts_of(state, convert=converts))), {
        "a.o_proj.weight": codes, "a.o_proj.weight_scale_inv": scales,
        "a.norm.weight": weight[0].bfloat16(), "steps": torch.tensor(3),
        "a.bias_correction": weight[1]})


def test_two_conversions_that_give_one_tensor_are_refused():
    with pytest.raises(rekindle.InvalidError, match="'a' and 'b' both give 'c'"):
        parts_of({"a": torch.zeros(2), "b": torch.zeros(2)},
                 convert=lambda part: [part._replace(name="c")])
