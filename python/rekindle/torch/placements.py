"""Which boxes of a DTensor a rank has. Pure arithmetic: no torch, no communication.

Along one dimension, a rank's local data is a list of runs: ranges of the whole tensor, in the order
in which they lie in the local tensor. Each placement cuts the runs that the placements before it
have left. The boxes are the products of the runs of all dimensions.

Placements are asked for by their attributes, not by their classes, because these classes have moved
between versions of torch.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InvalidError


class LocalBox(NamedTuple):
    """A box of the whole tensor, and where it begins in the rank's local tensor."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]


class Run(NamedTuple):
    start: int
    stop: int


def local_boxes(name: str, shape: Sequence[int], local_shape: Sequence[int],
                mesh_shape: Sequence[int], coordinate: Sequence[int],
                placements: Sequence[Any]) -> list[LocalBox]:
    """Returns the boxes that the rank at `coordinate` of the mesh has.

    `local_shape`: that of the rank's local tensor. InvalidError: a placement without an offset
    (Partial), or placements that do not give the local shape."""
    _check(name, placements)
    columns = []
    for dim, size in enumerate(shape):
        cuts = [_Cut(mesh_shape[at], coordinate[at], getattr(one, "split_factor", 1))
                for at, one in enumerate(placements)
                if not one.is_replicate() and one.dim % len(shape) == dim]
        columns.append([_runs(size, order) for order in _orders(cuts)])
    if 0 in local_shape and any(not _length(one) for column in columns for one in column):
        # The other dimensions of an empty local tensor depend on the version of torch.
        return []
    chosen = []
    for dim, column in enumerate(columns):
        fitting = [one for one in column if _length(one) == local_shape[dim]]
        if not fitting:
            raise InvalidError(
                f"'{name}' has a local shape of {list(local_shape)}, but its placements "
                f"{tuple(placements)} give {_length(column[0])} in dimension {dim}: make it with "
                "distribute_tensor, or redistribute it")
        chosen.append(fitting[0])
    return [LocalBox(tuple(run.start for run, _ in box),
                     tuple(run.stop - run.start for run, _ in box), tuple(at for _, at in box))
            for box in itertools.product(*map(_placed, chosen))]


def _check(name: str, placements: Sequence[Any]) -> None:
    for placement in placements:
        if placement.is_partial():
            raise InvalidError(
                f"'{name}' is {placement} on its mesh, so that no rank has its values: call "
                "redistribute() with Replicate() or Shard() in its place, on every rank")
        if not placement.is_replicate() and not isinstance(getattr(placement, "dim", None), int):
            raise InvalidError(f"'{name}' has the placement {placement}, which Rekindle does not "
                               "know: redistribute() it with Replicate() or Shard()")


class _Cut(NamedTuple):
    """One placement that shards a dimension."""

    ranks: int
    rank: int
    # More than 1 for a strided shard.
    split_factor: int


def _orders(cuts: list[_Cut]) -> list[list[_Cut]]:
    """Returns the orders in which the cuts may have been made, the likely one first.

    By definition, placements cut from left to right, and a strided shard cuts each of
    `split_factor` pieces. FSDP2 with tensor parallelism (TP) uses a strided shard, but cuts in
    another way: TP's shards first, then the local tensor of each TP rank. Both are the same for
    even shards. For uneven shards they may differ, and the size of the local tensor decides. If
    both sizes fit, FSDP2's order is taken: hardly anything else makes such placements."""
    for at, cut in enumerate(cuts):
        later = cuts[at + 1:]
        if cut.split_factor > 1 and cut.split_factor == math.prod(one.ranks for one in later):
            return [[*cuts[:at], *later, cut._replace(split_factor=1)], cuts]
    return [cuts]


def _runs(size: int, cuts: list[_Cut]) -> list[Run]:
    runs = [Run(0, size)]
    for cut in cuts:
        length = _length(runs)
        taken: list[Run] = []
        for piece in range(cut.split_factor):
            start, stop = _chunk(length, cut.split_factor, piece)
            first, last = _chunk(stop - start, cut.ranks, cut.rank)
            taken += _slice(runs, start + first, start + last)
        runs = _merged(taken)
    return runs


def _chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Returns one range of torch.chunk(): the last ones may be shorter, or empty."""
    step = -(-size // count)
    return min(size, index * step), min(size, (index + 1) * step)


def _length(runs: Sequence[Run]) -> int:
    return sum(run.stop - run.start for run in runs)


def _slice(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Returns elements [start, stop) of the concatenated runs."""
    found, at = [], 0
    for run in runs:
        first, last = max(start - at, 0), min(stop - at, run.stop - run.start)
        if first < last:
            found.append(Run(run.start + first, run.start + last))
        at += run.stop - run.start
    return found


def _merged(runs: list[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return merged


def _placed(runs: list[Run]) -> list[tuple[Run, int]]:
    """Returns each run with its place in the local tensor."""
    ends = list(itertools.accumulate(run.stop - run.start for run in runs))
    return list(zip(runs, [0, *ends]))
