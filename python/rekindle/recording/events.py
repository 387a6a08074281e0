"""The writes of a loader to its targets, in their order."""
from __future__ import annotations

from typing import NamedTuple

from .geometry import Ints
from .values import Flow


class Write(NamedTuple):
    """A copy into a parameter. `flows`: where each element comes from; None: not all are known.
    `sources`: the tensors that it comes from.
    """
    # "": memory of targets, but not within one of them.
    parameter: str
    offset: int
    size: Ints
    stride: Ints
    sources: frozenset[str]
    flows: tuple[Flow, ...] | None


class Fill(NamedTuple):
    """A write of a value that is not from the checkpoint. `value` None: it is not a constant."""
    parameter: str
    offset: int
    size: Ints
    stride: Ints
    value: float | int | bool | None


Event = Write | Fill
