"""Carries a plan out: boxes of a session to where the moves say, and the rest by the engine's own
loader.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import dtypes
from ..boxes import Box, TensorInfo
from ..errors import InvalidError
from .geometry import Ints, lattice, row_major, split
from .plan import Entry, Move, Plan
from .recorder import Load
from .targets import named_targets
from .tracer import TensorMeta

if TYPE_CHECKING:
    from torch import nn

    from ..session import Session


def catalog_of(tensors: Iterable[TensorInfo]) -> dict[str, TensorMeta]:
    """For `record`: of `rekindle.catalog(…).tensors`, or a session's `tensors()`."""
    return {info.name: TensorMeta(tuple(info.full_shape), dtypes.torch_dtype(info.dtype))
            for info in tensors}


def boxes(plan: Plan) -> list[Box]:
    """What to attach with: `rekindle.attach(model, version, shard=boxes(plan), device=…)`."""
    wanted = {Box(m.name, m.box_offset, m.box_extent): None for m in plan.moves()}
    wanted.update((Box(name), None) for name in plan.opaque)
    return list(wanted)


def execute(plan: Plan, load: Load, targets: nn.Module | Mapping[str, torch.Tensor],
            session: Session, *, timeout: float | None = 60.0) -> None:
    """Fills `targets` from a session that was attached with `boxes(plan)`; the caller commits. What
    is queued on the devices' current streams has ended then.

    `load` is called with the opaque tensors, whole and in host memory, and only when there are
    some. Constants come first, then moves, then `load`. `timeout`: seconds without anything new
    from the session.

    Raises InvalidError when the version's tensors are not those that the plan was recorded for, and
    what `Session.load_into` and `load` raise.
    """
    tensors = dict(targets) if isinstance(targets, Mapping) else named_targets(targets)
    _check(plan, session)
    with torch.no_grad():
        if len(plan):
            _carry_out(plan, load, tensors, session, timeout)
        else:
            _fill(plan, tensors)
            load(_streamed(session, timeout))
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _carry_out(plan: Plan, load: Load, tensors: Mapping[str, torch.Tensor], session: Session,
               timeout: float | None) -> None:
    wanted, scratches = _places(plan, tensors)
    opaque = _buffers(plan)
    wanted.update((Box(name), [buffer]) for name, buffer in opaque.items())
    _fill(plan, tensors)
    session.load_into(wanted, timeout=timeout)
    for scratch in scratches:
        scratch.to.copy_(scratch.part)
    if opaque:
        load(iter(opaque.items()))


def _check(plan: Plan, session: Session) -> None:
    there = catalog_of(session.tensors())
    for name, shape, dtype in plan.entries:
        meta = there.get(name)
        if meta is None or meta.shape != shape or _short(meta.dtype) != dtype:
            now = "absent" if meta is None else f"{_short(meta.dtype)} {list(meta.shape)}"
            raise InvalidError(f"{name} is {now} in {session.model}@{session.version}, the plan "
                               f"was recorded for {dtype} {list(shape)}: record it again")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fill(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    for parameter, offset, size, stride, value in plan.constants:
        _strided(tensors[parameter], offset, size, stride).fill_(value)


def _strided(tensor: torch.Tensor, offset: int, size: Ints, stride: Ints) -> torch.Tensor:
    data = tensor.detach()
    return data.as_strided(size, stride, data.storage_offset() + offset)


class _Scratch(NamedTuple):
    to: torch.Tensor
    part: torch.Tensor


def _places(plan: Plan, tensors: Mapping[str, torch.Tensor]
            ) -> tuple[dict[Box, list[torch.Tensor]], list[_Scratch]]:
    """Where each box goes, in the box's shape; and what is copied on from boxes of which parts are
    wanted.
    """
    entries = {entry.name: entry for entry in plan.entries}
    wanted: dict[Box, list[torch.Tensor]] = {}
    held: dict[Box, torch.Tensor] = {}
    scratches = []
    for move in plan.moves():
        box = Box(move.name, move.box_offset, move.box_extent)
        place = _whole_box(move, entries[move.name], tensors[move.parameter])
        if place is None:
            if box not in held:
                held[box] = torch.empty(move.box_extent, device=tensors[move.parameter].device,
                                        dtype=getattr(torch, entries[move.name].dtype))
                wanted.setdefault(box, []).append(held[box])
            scratches.append(_scratch(move, held[box], tensors[move.parameter]))
        else:
            wanted.setdefault(box, []).append(place)
    return wanted, scratches


def _scratch(move: Move, box: torch.Tensor, tensor: torch.Tensor) -> _Scratch:
    bits = box.view(getattr(torch, move.dtype))
    return _Scratch(_strided(tensor, move.offset, move.size, move.stride),
                    bits.as_strided(move.size, move.source_stride, move.source_offset))


def _whole_box(move: Move, entry: Entry, tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of the parameter in the box's shape, when the move takes every element of the box
    once.
    """
    if move.direct:
        stride = row_major(move.box_extent)
    else:
        dims = list(zip(move.size, move.source_stride, move.stride))
        found = lattice(move.box_extent, move.source_offset, move.size, move.source_stride)
        if found is None:
            return None
        along = {atom.dim: (atom, dim) for atom, dim in zip(found.atoms, split(dims, found))}
        wide = [k for k, n in enumerate(move.box_extent) if n > 1]
        if sorted(along) != wide or len(along) != len(found.atoms) or any(
                along[k][0].size != move.box_extent[k] for k in wide):
            return None
        stride = tuple(along[k][1][2] if k in along else 0 for k in range(len(move.box_extent)))
    place = _strided(tensor, move.offset, move.box_extent, stride)
    if move.dtype == entry.dtype:
        return place
    return place.view(getattr(torch, entry.dtype)) if _short(tensor.dtype) == move.dtype else None


def _buffers(plan: Plan) -> dict[str, torch.Tensor]:
    entries = {entry.name: entry for entry in plan.entries}
    return {name: torch.empty(entries[name].shape, dtype=getattr(torch, entries[name].dtype))
            for name in plan.opaque}


def _streamed(session: Session, timeout: float | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies, because loaders keep tensors, and change them, while a session's are views."""
    for info, tensor in session.entries(timeout):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        yield info.name, copy.copy_(tensor)
