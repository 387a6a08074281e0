"""How a trainer rank's weights come: as shards, or as tensors that are gathered one by one."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rekindle._parts import Part
from rekindle.torch import parts_of


class ShardedWeights(Iterator["tuple[str, torch.Tensor]"]):
    """What a training engine gives in the place of a generator, if the ranks can publish their
    shards.

    As an iterator, it is the framework's own generator: every tensor is gathered when it comes. Rekindle
    calls `parts()` instead, and then nothing is gathered. `parts`: returns what this rank
    publishes, for example by `rekindle.torch.parts_of`. `gathered`: returns that generator. Both
    are called on every rank or on none."""

    def __init__(self, parts: Callable[[], list[Part]],
                 gathered: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self.parts = parts
        self._gathered = gathered
        self._iterator: Iterator[tuple[str, torch.Tensor]] | None = None

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._iterator is None:
            self._iterator = iter(self._gathered())
        return next(self._iterator)


def share_of(rank: int, world: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Part]:
    """Returns this rank's share of tensors that come whole on every rank: each tensor is that of
    the rank with the fewest bytes so far. Copies the share to host memory."""
    taken = [0] * world
    found = []
    for name, tensor in weights:
        owner = taken.index(min(taken))
        taken[owner] += tensor.nbytes
        if owner == rank:
            found += parts_of({name: tensor.detach().to("cpu", copy=True)})
    return found


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def gathered(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers DTensors as they come."""
    for name, tensor in weights:
        yield name, tensor.full_tensor() if is_distributed(tensor) else tensor
