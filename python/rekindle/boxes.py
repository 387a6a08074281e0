"""Parts of tensors, and the description of a session's tensors."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor: `offset` and `extent` in elements, one per dimension.

    Without them, the box is the whole tensor. A Box is also a key of `Session.load_into`."""

    tensor: str
    offset: tuple[int, ...] = ()
    extent: tuple[int, ...] = ()


class TensorInfo(NamedTuple):
    """A tensor of a session, or a box of one."""

    name: str
    dtype: str  # as in safetensors: "BF16"
    shape: tuple[int, ...]  # of the box
    # The offset of the box in the whole tensor.
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]  # of the whole tensor
    nbytes: int  # of the box

    @property
    def box(self) -> Box:
        return Box(self.name, self.offset, self.shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
