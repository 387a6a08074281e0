"""Executes a plan: moves boxes of a session to their places. The engine's loader does the rest."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import dtypes
from .._attaching import Request
from .._loading import MOST_BUFFERED
from .._targets import copying
from ..boxes import Box, TensorInfo, row_major
from ..errors import InvalidError
from .geometry import Ints, lattice, split
from .plan import Entry, Move, Plan
from .recorder import Load
from .targets import named_targets
from .tracer import TensorMeta

if TYPE_CHECKING:
    from torch import nn

    from ..session import Session


def catalog_of(tensors: Iterable[TensorInfo]) -> dict[str, TensorMeta]:
    """Returns a catalog for `record`, of `rekindle.catalog(…).tensors` or a session's `tensors()`.
    """
    return {info.name: TensorMeta(tuple(info.full_shape), dtypes.torch_dtype(info.dtype))
            for info in tensors}


def boxes(plan: Plan) -> list[Box]:
    """Returns the shard to attach with: `attach(model, version, shard=boxes(plan), device=…)`."""
    wanted = {Box(m.name, m.box_offset, m.box_extent): None for m in plan.moves()}
    wanted.update((Box(name), None) for name in plan.opaque)
    return list(wanted)


def execute(plan: Plan, load: Load, targets: nn.Module | Mapping[str, torch.Tensor],
            session: Session, *, timeout: float | None = 60.0) -> None:
    """Fills `targets` from a session that was attached with `boxes(plan)`. The caller commits. On
    return, all work on the devices' current streams has ended.

    Constants come first, then moves, then `load`. The recording has already written the constants
    of a plan that is not replayable. `load` is called only if there are opaque tensors. It gets
    them whole, in host memory and in the plan's order. Each is copied when `load` asks for it, and
    released then. Before that it costs no memory besides the agent's. `timeout`: seconds without
    anything new from the session.

    Raises InvalidError when the version's tensors are not those that the plan was recorded for, and
    what `Session.entries`, `Session.load_into` and `load` raise.
    """
    tensors = dict(targets) if isinstance(targets, Mapping) else named_targets(targets)
    _check(plan, session)
    with torch.no_grad():
        # The recording has already written the constants, and other values, of a plan that is not
        # replayable.
        if plan.replayable:
            _fill(plan, tensors)
        if session.device is None:
            _from_host(plan, load, tensors, session, timeout)
        else:
            _from_device(plan, load, tensors, session, timeout)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


# The name of a tensor and the start of a box in it.
Key = tuple[str, Ints]
Entries = Iterator[tuple[TensorInfo, torch.Tensor]]
Waiting = dict[str, torch.Tensor]


def _from_host(plan: Plan, load: Load, tensors: Mapping[str, torch.Tensor], session: Session,
               timeout: float | None) -> None:
    """Copies from the host map. Keeping views of opaque tensors there takes no memory."""
    entries, waiting = session.entries(timeout), Waiting()
    if len(plan):
        _move_each(_places(plan, tensors), entries, session, waiting)
    if plan.opaque:
        load(_in_order(plan.opaque, entries, waiting))
    for _ in entries:
        # A loader may stop before the end, but all tensors must be handed out.
        pass


def _from_device(plan: Plan, load: Load, tensors: Mapping[str, torch.Tensor], session: Session,
                 timeout: float | None) -> None:
    """Copies on the device. When all buckets have come, the opaque tensors are in this host's
    memory: a second session reads them there.
    """
    places = _places(plan, tensors)
    if sum(place.buffer_bytes for place in places.values()) > MOST_BUFFERED:
        with copying(session._device):
            _move_each(places, session.entries(timeout), session, {})
    else:
        buffers = {key: place.buffer() for key, place in places.items() if place.parts}
        wanted = {place.box: [*place.whole, *([buffers[key]] if key in buffers else ())]
                  for key, place in places.items()}
        _refuse(session.load_into(wanted, strict=False, timeout=timeout).missing, session)
        for key, buffer in buffers.items():
            places[key].copy_parts(buffer)
    if plan.opaque:
        with _again(session, plan.opaque, timeout) as host:
            load(_in_order(plan.opaque, host.entries(timeout), {}))


def _again(session: Session, names: Iterable[str], timeout: float | None) -> Session:
    request = Request(f"{session.model}@{session.version}", boxes=tuple(Box(n) for n in names))
    return type(session)(request, session._store, timeout)


def _move_each(places: Mapping[Key, _Place], entries: Entries, session: Session,
               waiting: Waiting) -> None:
    left = dict(places)
    for info, tensor in entries:
        place = left.pop((info.name, info.offset), None)
        if place is None:
            waiting[info.name] = tensor
            continue
        for target in place.whole:
            target.copy_(tensor)
        place.copy_parts(tensor)
    _refuse([place.box.tensor for place in left.values()], session)


def _refuse(missing: Sequence[str], session: Session) -> None:
    if missing:
        raise InvalidError(f"the session of {session.model}@{session.version} is without "
                           f"{missing[0]}, which the plan moves: attach with the plan's boxes, and "
                           "iterate over nothing before")


def _in_order(names: Iterable[str], entries: Entries,
              waiting: Waiting) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields copies, because loaders keep and change tensors, and a session's are views."""
    for name in names:
        while name not in waiting:
            info, tensor = next(entries, (None, None))
            if info is None or tensor is None:
                raise InvalidError(f"the session is without {name}, which the loader is to be "
                                   "given")
            waiting[info.name] = tensor
            del tensor
        yield name, _copy(waiting.pop(name))


def _copy(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(view.shape, dtype=view.dtype).copy_(view)


def _check(plan: Plan, session: Session) -> None:
    there = catalog_of(session.tensors())
    for name, shape, dtype in plan.entries:
        meta = there.get(name)
        found = meta and (meta.shape, dtypes.short_name(meta.dtype))
        if found != (shape, dtype):
            now = f"{found[1]} {list(found[0])}" if found else "absent"
            raise InvalidError(f"{name} is {now} in {session.model}@{session.version}, the plan "
                               f"was recorded for {dtype} {list(shape)}: record it again")


def _fill(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    for parameter, offset, size, stride, value in plan.constants:
        _strided(tensors[parameter], offset, size, stride).fill_(value)


def _strided(tensor: torch.Tensor, offset: int, size: Ints, stride: Ints) -> torch.Tensor:
    data = tensor.detach()
    return data.as_strided(size, stride, data.storage_offset() + offset)


class _Place(NamedTuple):
    """The destinations of one box."""
    box: Box
    dtype: torch.dtype
    whole: list[torch.Tensor]  # in the box's shape
    # Tensors of which only some elements are wanted.
    parts: list[tuple[torch.Tensor, Move]]

    @property
    def buffer_bytes(self) -> int:
        return prod(self.box.extent) * self.dtype.itemsize if self.parts else 0

    def buffer(self) -> torch.Tensor:
        return torch.empty(self.box.extent, dtype=self.dtype, device=self.parts[0][0].device)

    def copy_parts(self, box: torch.Tensor) -> None:
        for to, move in self.parts:
            bits = box.view(getattr(torch, move.dtype))
            to.copy_(_strided(bits, move.source_offset, move.size, move.source_stride))


def _places(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[Key, _Place]:
    entries = {entry.name: entry for entry in plan.entries}
    places: dict[Key, _Place] = {}
    for move in plan.moves():
        key, entry = (move.name, move.box_offset), entries[move.name]
        tensor = tensors[move.parameter]
        if key not in places:
            places[key] = _Place(Box(move.name, move.box_offset, move.box_extent),
                                 getattr(torch, entry.dtype), [], [])
        whole = _whole_box(move, entry, tensor)
        if whole is not None:
            places[key].whole.append(whole)
        else:
            to = _strided(tensor, move.offset, move.size, move.stride)
            places[key].parts.append((to, move))
    return places


def _whole_box(move: Move, entry: Entry, tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a view of the parameter in the box's shape. None: the move does not take every
    element of the box once, or cannot take their bits.
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
    if dtypes.short_name(tensor.dtype) != move.dtype:
        return None
    return place.view(getattr(torch, entry.dtype))
