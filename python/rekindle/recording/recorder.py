"""Runs an engine's loader on stand-ins and makes a plan of what it did."""
from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .geometry import Ints, Lattice, coalesce, inside, lattice, rows_around, split
from .overlap import Event, demoted
from .plan import Constant, Entry, Move, Plan, pack
from .targets import named_targets
from .tracer import Fill, NeedsData, Recorder, TensorMeta, Traced, Write
from .values import Flow, sources

if TYPE_CHECKING:
    from torch import nn

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Catalog = Mapping[str, TensorMeta]
_MOST_RUNS = 32


def record(load: Load, catalog: Catalog, targets: nn.Module | Mapping[str, torch.Tensor], *,
           device: str | torch.device = "cpu") -> Plan:
    """What `load(iterable of (name, tensor))` reads of the catalog's tensors, and where in
    `targets` it puts it.

    The loader runs with tensors without storage that claim to be on `device`; nothing is read. It
    may run several times: when it asks for values, or raises, the tensor that it was given last and
    those of the same name but for numbers are made opaque, and it is run without them. Parameters
    keep their values, but for constants that the loader writes (padding).

    Raises what the loader raises when it fails before it has taken a tensor.
    """
    with _without_collections():
        return _record(load, catalog, targets, torch.device(device))


def _record(load: Load, catalog: Catalog, targets: nn.Module | Mapping[str, torch.Tensor],
            device: torch.device) -> Plan:
    tensors = dict(targets) if isinstance(targets, Mapping) else named_targets(targets)
    module = None if isinstance(targets, Mapping) else targets
    left_out: set[str] = set()
    for _ in range(_MOST_RUNS):
        offered = {name: meta for name, meta in catalog.items() if name not in left_out}
        recorder, returned, blamed = _run(load, offered, tensors, module, device)
        if not blamed:
            break
        left_out |= _families(blamed, offered)
    else:
        left_out, recorder, returned = set(catalog), None, None
    if recorder is None or len(left_out) == len(catalog):
        return pack((), (), catalog, loaded=None)
    opaque = demoted(recorder.events, tensors, recorder.opaque | left_out, catalog)
    if opaque and not _repeatable(load, catalog, tensors, module, recorder, opaque, left_out):
        return pack((), (), catalog, loaded=_names(returned))
    return plan_of(recorder.events, opaque, catalog, _names(returned))


def _run(load: Load, offered: Catalog, tensors: Mapping[str, torch.Tensor],
         module: nn.Module | None, device: torch.device) -> tuple[Recorder, Any, set[str]]:
    """One run; the names that are to be left out of the next one, if there must be one."""
    recorder, returned = Recorder(tensors, device), None
    try:
        with torch.no_grad(), recorder:
            returned = load(recorder.tensors(offered))
    except NeedsData as need:
        return recorder, None, set(need.names)
    except Exception:
        if recorder.last is None:
            raise
        return recorder, None, {recorder.last}
    finally:
        if module is not None:
            recorder.opaque |= _put_back(module, tensors)
    return recorder, returned, set(recorder.asked)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A recording makes millions of objects and no cycles of them; looking for those would take
    most of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _put_back(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Parameters that the loader has replaced by a stand-in become what they were; their tensors
    are opaque.
    """
    names: set[str] = set()
    for name, tensor in named_targets(module).items():
        if isinstance(tensor, Traced):
            names.update(sources(tensor._value))
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, tensors.get(name))
    return names


def _families(names: Iterable[str], catalog: Catalog) -> set[str]:
    """These tensors, and those that differ only by numbers in the name: the loader treats them
    alike.
    """
    kinds = {(re.sub(r"\d+", "#", name), catalog[name].dtype) for name in names if name in catalog}
    return {name for name, meta in catalog.items()
            if (re.sub(r"\d+", "#", name), meta.dtype) in kinds}


def _repeatable(load: Load, catalog: Catalog, tensors: Mapping[str, torch.Tensor],
                module: nn.Module | None, full: Recorder, opaque: set[str],
                left_out: set[str]) -> bool:
    """Whether the loader, given the opaque tensors alone, writes to the same places as when it was
    given all.
    """
    alone = {name: meta for name, meta in catalog.items() if name in opaque - left_out}
    if not alone:
        return True
    recorder, _, blamed = _run(load, alone, tensors, module, full.device)
    return not blamed and _places(recorder.events, opaque) == _places(full.events, opaque)


def _places(events: Iterable[Event], names: set[str]) -> set[tuple[Any, ...]]:
    return {(e.parameter, e.offset, e.size, e.stride, e.sources) for e in events
            if isinstance(e, Write) and e.sources & names}


def _names(returned: Any) -> frozenset[str] | None:
    """What a loader says that it has loaded, where it says that: a set of names of parameters."""
    if isinstance(returned, (set, frozenset)) and all(isinstance(n, str) for n in returned):
        return frozenset(returned)
    return None


def plan_of(events: Iterable[Event], opaque: set[str], catalog: Catalog,
            loaded: frozenset[str] | None = None) -> Plan:
    """A plan of the writes that no opaque tensor has part in, and of the constants."""
    flows: dict[tuple[str, Flow], None] = {}
    constants, replayable = [], True
    for event in events:
        if isinstance(event, Fill):
            replayable = replayable and event.value is not None
            if event.value is not None:
                constants.append(Constant(event.parameter, event.offset, event.size, event.stride,
                                          event.value))
        elif not event.sources & opaque:
            flows.update(dict.fromkeys((event.parameter, flow) for flow in event.flows or ()))
    moves = _moves(flows)
    used = dict.fromkeys(move.name for move in moves) | dict.fromkeys(sorted(opaque))
    entries = [Entry(name, tuple(catalog[name].shape), _short(catalog[name].dtype))
               for name in used]
    return pack(moves, entries, opaque, constants, loaded, replayable)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _moves(flows: Iterable[tuple[str, Flow]]) -> list[Move]:
    """Boxes of one tensor that begin at the same place become one box: a session names boxes by
    where they begin.
    """
    flows = list(flows)
    found = [lattice(f.source.shape, f.offset, [d[0] for d in f.dims], [d[1] for d in f.dims])
             for _, f in flows]
    whole: set[str] = set()
    while True:
        boxes = [_box(flow, at, whole) for (_, flow), at in zip(flows, found)]
        extents: dict[tuple[str, Ints], Ints] = {}
        for (_, flow), (start, extent) in zip(flows, boxes):
            key = (flow.source.name, start)
            before = extents.get(key)
            extents[key] = extent if before is None else tuple(map(max, before, extent))
        moves = [_move(parameter, flow, at, start, extents[flow.source.name, start])
                 for (parameter, flow), at, (start, _) in zip(flows, found, boxes)]
        failed = {flow.source.name for (_, flow), move in zip(flows, moves) if move is None}
        if not failed:
            return [move for move in moves if move is not None]
        whole |= failed


def _box(flow: Flow, found: Lattice | None, whole: set[str]) -> tuple[Ints, Ints]:
    shape = flow.source.shape
    if flow.source.name in whole:
        return (0,) * len(shape), shape
    if found is not None:
        return found.start, found.extent(len(shape))
    return rows_around(shape, flow.offset, [d[0] for d in flow.dims], [d[1] for d in flow.dims])


def _move(parameter: str, flow: Flow, found: Lattice | None, start: Ints, extent: Ints
          ) -> Move | None:
    """None when the flow is no lattice and its box has grown to one that does not have whole rows.
    """
    dims = split(flow.dims, found) if found is not None else flow.dims
    placed = inside(flow.source.shape, (start, extent), flow.offset, [d[0] for d in dims],
                    [d[1] for d in dims])
    if placed is None:
        return None
    offset, strides = placed
    merged = coalesce([(d[0], s, d[2]) for d, s in zip(dims, strides)])
    size, source_stride, stride = zip(*merged) if merged else ((), (), ())
    return Move(flow.source.name, start, extent, offset, source_stride, parameter, flow.to, size,
                stride, _short(flow.dtype))
