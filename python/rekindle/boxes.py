"""Parts of tensors, and what a session says of each that it has."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor: `offset` and `extent` in elements, one per dimension.

    Without them, the whole tensor. Also a key of `Session.load_into`."""

    tensor: str
    offset: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()


class TensorInfo(NamedTuple):
    """A tensor, or a box of one, of a session."""

    name: str
    dtype: str  # as in safetensors: "BF16"
    shape: tuple[int, ...]  # of what is here
    # The offset of the box in the whole tensor.
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]  # of the whole tensor
    nbytes: int  # of what is here

    @property
    def box(self) -> Box:
        return Box(self.name, self.offset, self.shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
