"""Quantizes weights to FP8 with a scale for each block of 128 x 128, as in the checkpoints of
DeepSeek-V3 and Kimi K2.

The arithmetic is that of `weight_quant` in DeepSeek-V3's inference/kernel.py, in FP32 with correct
rounding: scale = amax / 448, y = x / scale, and y to E4M3, to nearest even. (Triton's division on
GPUs may differ from it in the last bit.) That kernel divides by zero for a block of zeros. There we
do as slime and verl (`blockwise_cast_to_fp8`): amax is at least 1e-10, so that the block stays
zero. Both of them multiply by 1 / scale instead of dividing, and so round a few elements to the
other neighbour.
"""
from __future__ import annotations

import torch

from .._parts import Part
from ..errors import InvalidError
from .casting import Convert, Select, selection

BLOCK = 128
_LARGEST = 448.0  # of E4M3
_LEAST_AMAX = 1e-10
# Elements that are converted at a time: a few FP32 copies of them exist meanwhile.
_STRIP_ELEMENTS = 1 << 24

# The projections that DeepSeek-V3 and Kimi K2 keep in FP8. Embeddings, norms, routers and the
# output head are not among them.
DEEPSEEK_V3 = (r".*\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj"
               r"|gate_proj|up_proj|down_proj)\.weight")


def fp8_blocks(select: Select = DEEPSEEK_V3) -> Convert:
    """Returns a conversion of weights (BF16, F16 or F32) to F8_E4M3 with block scales.

    A tensor `x.weight` becomes `x.weight` (F8_E4M3) and `x.weight_scale_inv` (F32, one element for
    each block). `select`: a regex for whole names of the checkpoint, or a function of the name.
    Each rank converts its own boxes. InvalidError: a box that cuts a block, because a scale needs
    the whole block."""
    chosen = selection(select)

    def convert(part: Part) -> list[Part]:
        return _converted(part) if chosen(part.name) else [part]
    return convert


def _converted(part: Part) -> list[Part]:
    if len(part.shape) != 2:
        raise InvalidError(f"'{part.name}' has {len(part.shape)} dimensions and cannot have blocks "
                           "of 128 x 128: Unstack it, or do not select it")
    if part.dtype not in ("BF16", "F16", "F32"):
        raise InvalidError(f"'{part.name}' is {part.dtype}, which is not quantized to F8_E4M3: do "
                           "not select it")
    for dim, what in enumerate(("row", "column")):
        start, size = part.offset[dim], part.shape[dim]
        for border in (start, start + part.extent[dim]):
            if border % BLOCK and border != size:
                raise InvalidError(
                    f"'{part.name}' is cut at {what} {border}, inside a block of 128 x 128: shard "
                    f"it at multiples of 128 {what}s, shard another dimension, or do not select it")
    quantized = _Quantized(part)
    return [part._replace(dtype="F8_E4M3", read=quantized.weight),
            part._replace(name=part.name + "_scale_inv", dtype="F32", shape=_blocks(part.shape),
                          offset=tuple(start // BLOCK for start in part.offset),
                          extent=_blocks(part.extent), read=quantized.scale)]


def _blocks(extent: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-count // BLOCK) for count in extent)


class _Quantized:
    """A quantized part. Keeps the scales, which are small, from one read to the other, so that
    the source is read once if the weight is read first."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._scale: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        weight, self._scale = quantize(self._part.read())
        return weight

    def scale(self) -> torch.Tensor:
        scale, self._scale = self._scale, None
        return quantize(self._part.read())[1] if scale is None else scale


@torch.no_grad()
def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a 2-D tensor in F8_E4M3, and its scales: FP32, one for each block of 128 x 128. On
    the tensor's device."""
    rows, columns = weight.shape
    result = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(_blocks((rows, columns)), dtype=torch.float32, device=weight.device)
    step = max(1, _STRIP_ELEMENTS // max(1, columns) // BLOCK) * BLOCK
    for start in range(0, rows, step):
        strip = weight[start:start + step]
        result[start:start + step], scales[start // BLOCK:(start + step) // BLOCK] = _strip(strip)
    return result, scales


def _strip(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    high, wide = _blocks((rows, columns))
    values = torch.nn.functional.pad(
        weight.float(), (0, wide * BLOCK - columns, 0, high * BLOCK - rows))
    blocks = values.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(_LEAST_AMAX) / _LARGEST
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(high * BLOCK, wide * BLOCK)[:rows, :columns], scale
