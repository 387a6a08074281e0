"""Publishes a sharded model: each rank of a trainer gives its own boxes of the tensors."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch

from .._parts import Part
from ..errors import InvalidError
from .casting import Convert
from .joining import Item, joined
from .names import Names, renamed
from .sharded import Layout, Source, named_parts

if TYPE_CHECKING:
    from ..publication import Published

Converts = Union[Convert, Sequence[Convert]]


def publish(model: Source, model_version: str, *, rank: int | None = None, world: int | None = None,
            group: Any = None, names: Names | None = None, convert: Converts | None = None,
            layout: Layout | None = None, files: Mapping[str, bytes] | None = None,
            agent: str | os.PathLike[str] | None = None,
            timeout: float | None = 600.0) -> Published:
    """Publishes "k2@42" together with the other ranks of a trainer. Every rank calls it, and the
    calls return when the whole version is published.

    `model`: a module or a mapping of names to tensors, as this rank has it, or a list of parts
    (from `parts_of` or `flat_parts`). Of DTensors (FSDP2, tensor parallelism) and of modules in
    FSDP1, the rank publishes its own shards, and nothing is gathered. Plain tensors are whole, on
    each rank the same, unless `layout` says otherwise.
    `rank`, `world`: default to those of `group`, or of torch.distributed's default group, or to a
    single rank. `names`: rules, or a function, from the trainer's names to the checkpoint's.
    `convert`: called with each part under its new name, and returns the parts to publish instead:
    `cast("BF16")`, `fp8_blocks()`, or your own; a sequence is applied in order. Conversions run
    where the tensor is, one at a time. `layout`: for plain tensors that are shards, a function of
    name and tensor, or a mapping of names: gives (shape of the whole tensor, offset of the rank's),
    or None. `files`: small files beside the tensors; those of rank 0 count.

    Do not change the model before the call returns. Raises InvalidError, naming the tensor, before
    anything is published, and what `rekindle.publish` raises."""
    rank, world = _place(rank, world, group)
    parts = parts_of(model, names=names, convert=convert, layout=layout)
    from ..joint import publisher
    with publisher(model_version, rank=rank, world=world, agent=agent) as publication:
        for part in parts:
            publication.add_part(part)
        if rank == 0:
            for name, data in (files or {}).items():
                publication.file(name, data)
        return publication.commit(timeout)


def parts_of(model: Source, *, names: Names | None = None, convert: Converts | None = None,
             layout: Layout | None = None) -> list[Part]:
    """Returns what `publish` would publish from this rank, without reading any tensor. A part has
    a name, dtype, whole shape, offset and extent."""
    parts = renamed(named_parts(model, layout), names)
    for one in (convert,) if callable(convert) else convert or ():
        # Joining checks that no two conversions give the same elements.
        parts = joined(Item(part.name, made) for part in parts for made in one(part))
    return parts


def _place(rank: int | None, world: int | None, group: Any) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise InvalidError("give rank and world, or neither")
    if rank is None or world is None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    if not 0 <= rank < world:
        raise InvalidError(f"rank {rank} is not in a world of {world}: only members of the group "
                           "may publish")
    return rank, world
