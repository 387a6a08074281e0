"""Flat shards: a rank has elements [start, stop) of a flattened parameter, as in FSDP1.

FSDP1 (`FullyShardedDataParallel`) concatenates the parameters of a module and gives each rank one
range. This module reads the ranges from FSDP1's own tables, and makes no communication. (FSDP1's
`state_dict()` gathers.)
"""
from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import _dense
from .._parts import Part, nothing_of
from ..errors import InvalidError

if TYPE_CHECKING:
    from torch import nn

# What FSDP1 and activation checkpointing add to the names of modules.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class FlatBox(NamedTuple):
    """A box of a tensor, and where its elements begin in the flattened tensor. The elements of the
    box are contiguous there."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    start: int


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[FlatBox]:
    """Returns the boxes that make up elements [start, stop) of a flattened tensor, in order.

    They are at most 2 * len(shape) - 1: parts of the first row, whole rows, parts of the last."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise InvalidError(f"elements [{start}, {stop}) are not in a tensor of shape {list(shape)}")
    return list(_boxes(tuple(shape), start, stop)) if start < stop else []


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[FlatBox]:
    if len(shape) < 2:
        yield FlatBox((start,), (stop - start,), start) if shape else FlatBox((), (), 0)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _inside(shape, first - 1, start, stop)
        return
    if start < first * row:
        yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        rest = shape[1:]
        yield FlatBox((first, *(0 for _ in rest)), (last - first, *rest), first * row)
    if last * row < stop:
        yield from _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[FlatBox]:
    """Yields the boxes of elements [start, stop), which lie within one row."""
    before = index * math.prod(shape[1:])
    for box in _boxes(shape[1:], start - before, stop - before):
        yield FlatBox((index, *box.offset), (1, *box.extent), before + box.start)


def flat_parts(name: str, shape: Sequence[int], flat: torch.Tensor, start: int) -> list[Part]:
    """Returns the parts of a parameter of this shape, of which the rank has `flat`: elements
    [start, start + len(flat)) of the flattened parameter."""
    shape, dtype = tuple(shape), _dense.dtype_name(name, flat.dtype)
    _dense.check(name, flat)
    boxes = flat_boxes(shape, start, start + flat.numel())
    return [Part(name, dtype, shape, box.offset, box.extent, _Slice(flat, box, start))
            for box in boxes] or [nothing_of(name, dtype, shape)]


class _Slice:
    def __init__(self, flat: torch.Tensor, box: FlatBox, start: int) -> None:
        self._flat, self._extent, self._at = flat, box.extent, box.start - start

    def __call__(self) -> torch.Tensor:
        count = math.prod(self._extent)
        return self._flat.detach()[self._at:self._at + count].view(self._extent)


def has_flat_shards(module: Any) -> bool:
    """Whether FSDP1 has flattened parameters of the module."""
    kind = _kind()
    return kind is not None and isinstance(module, torch.nn.Module) and any(
        isinstance(one, kind) for one in module.modules())


def _kind() -> Any:
    # A module of FSDP1 can exist only if this was imported.
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)


def module_parts(module: nn.Module) -> tuple[list[Part], dict[str, torch.Tensor]]:
    """Returns the parts of all flattened parameters, and the other parameters and persistent
    buffers by name. Names are those before wrapping."""
    parts: dict[str, list[Part]] = {}
    for prefix, one in module.named_modules():
        handle = getattr(one, "_handle", None) if isinstance(one, _kind()) else None
        if handle is not None:
            within = prefix + "." if prefix else ""
            parts.update(_handle_parts(within, handle.flat_param))
    others: dict[str, torch.Tensor] = {}
    for prefix, one in module.named_modules(remove_duplicate=False):
        kept = {name: buffer for name, buffer in one._buffers.items()
                if name not in one._non_persistent_buffers_set}
        for name, value in {**one._parameters, **kept}.items():
            full = _plain(f"{prefix}.{name}" if prefix else name)
            if value is not None and full not in parts and name != "_flat_param":
                others[full] = value
    return [part for group in parts.values() for part in group], others


def _handle_parts(prefix: str, flat: Any) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    # Before the first forward pass, the data of the flat parameter is this rank's shard.
    shard = getattr(flat, "_local_shard", None)
    shard = flat.data if shard is None else shard
    for own, shape, contiguous, extension, info in zip(
            flat._fqns, flat._shapes, flat._contiguities, flat._param_extensions,
            flat._shard_param_infos):
        name = _plain(prefix + own)
        if extension is not None:
            raise InvalidError(f"'{name}' is sharded by FSDP1 and by tensor parallelism: use "
                               "fully_shard (FSDP2), or publish a full state_dict")
        if not contiguous:
            raise InvalidError(f"'{name}' was not contiguous when FSDP1 flattened it: make the "
                               "parameter contiguous before wrapping")
        if info.in_shard:
            mine = shard[info.offset_in_shard:info.offset_in_shard + info.numel_in_shard]
            found[name] = flat_parts(name, shape, mine, info.intra_param_start_idx)
        else:
            found[name] = [nothing_of(name, _dense.dtype_name(name, shard.dtype), tuple(shape))]
    for tied in flat._shared_param_infos:
        name, first = (_plain(f"{prefix}{module}.{own}" if module else prefix + own) for module, own
                       in ((tied.module_name, tied.param_name),
                           (tied.prim_module_name, tied.prim_param_name)))
        found[name] = [part._replace(name=name) for part in found[first]]
    return found


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
