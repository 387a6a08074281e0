"""What a loader did to its targets, one event after the other."""
from __future__ import annotations

from typing import NamedTuple

from .geometry import Ints
from .values import Flow


class Write(NamedTuple):
    """A copy into a parameter: what it is made of, or, when not all of it is followed, from which
    tensors it came.
    """
    parameter: str  # "": memory of targets, but not within one
    offset: int
    size: Ints
    stride: Ints
    sources: frozenset[str]
    flows: tuple[Flow, ...] | None


class Fill(NamedTuple):
    """What the loader wrote to a parameter that is not of the checkpoint; `value` None: not a
    constant.
    """
    parameter: str
    offset: int
    size: Ints
    stride: Ints
    value: float | int | bool | None


Event = Write | Fill
