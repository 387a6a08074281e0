"""Runs an engine's loader on stand-ins and makes a plan of what it did."""
from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._optional import no_collections
from ..dtypes import short_name
from .effects import Attributes, Unrecordable, require_memory, still_held
from .events import Event, Fill, Write
from .geometry import Dim, Ints, Lattice, coalesce, inside, lattice, rows_around, split
from .overlap import demoted
from .plan import Constant, Entry, Move, Plan, pack
from .targets import named_targets, storage_key
from .tracer import NeedsData, Recorder, TensorMeta, Traced
from .values import Flow, sources

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("rekindle")

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Catalog = Mapping[str, TensorMeta]
_MOST_RUNS = 32


def record(load: Load, catalog: Catalog, targets: nn.Module | Mapping[str, torch.Tensor], *,
           device: str | torch.device = "cpu") -> Plan:
    """Records which elements of the catalog's tensors `load(iterable of (name, tensor))` reads, and
    where in `targets` it puts them.

    The loader runs on tensors without storage that claim to be on `device`; nothing is read. It may
    run several times. When it asks for values of tensors, or raises at a tensor, these become
    opaque, with the tensors whose names differ only by numbers, and it runs again without them.
    Parameters keep their values, except for constants that the loader writes (padding).

    A loader may do more than put tensors into targets: compute from what it fills, keep tensors, or
    set attributes with tensors. Then every tensor of the plan is opaque, so the loader gets all of
    them whole, and the log says why. In objects that are neither targets nor modules of `targets`
    (or of `load`, if that is a module's method), the recorder notices only stand-ins that are kept.
    All tensors also become opaque if the loader, given the opaque ones alone, would put them
    elsewhere or write other constants. If it writes an element twice, the later tensor of the
    catalog wins.

    Raises what the loader raises when it fails before it has taken a tensor.
    """
    try:
        return record_or_refuse(load, catalog, targets, device=device)
    except Unrecordable as why:
        logger.info("rekindle: %s is given whole tensors: it does more than a recording can stand "
                    "for: %s", getattr(load, "__qualname__", load), why)
        return _all_opaque(catalog)


def record_or_refuse(load: Load, catalog: Catalog, targets: nn.Module | Mapping[str, torch.Tensor],
                     *, device: str | torch.device = "cpu", dry: bool = False,
                     failed: dict[str, str] | None = None) -> Plan:
    """As `record`, but Unrecordable for a loader that does more than put tensors into targets.

    `dry`: parameters keep all of their values, and the loader's constants are only noted. A plan
    that is not replayable must then be recorded again before it is executed. `failed` is filled
    with the tensors at which the loader raised, and the errors.
    """
    with no_collections():
        return _record(load, catalog, targets, torch.device(device), dry,
                       {} if failed is None else failed)


class _Run(NamedTuple):
    recorder: Recorder
    returned: frozenset[str] | None = None
    # The names that the next run must leave out. Empty: no other run is needed.
    left_out: frozenset[str] = frozenset()
    sets: str | None = None
    effect: str | None = None
    # The error that the loader raised about the tensors that are left out.
    raised: str | None = None


class _Targets(NamedTuple):
    tensors: dict[str, torch.Tensor]
    # The module whose tensors can be replaced.
    module: nn.Module | None
    # The module whose attributes are compared.
    watched: nn.Module | None
    # True: the tensors keep their values.
    dry: bool = False


def _targets(load: Load, targets: nn.Module | Mapping[str, torch.Tensor]) -> _Targets:
    if not isinstance(targets, Mapping):
        return _Targets(named_targets(targets), targets, targets)
    owner = getattr(load, "__self__", None)
    return _Targets(dict(targets), None, owner if isinstance(owner, torch.nn.Module) else None)


def _all_opaque(catalog: Catalog, loaded: frozenset[str] | None = None) -> Plan:
    return pack((), (), catalog, loaded=loaded)


def _record(load: Load, catalog: Catalog, targets: nn.Module | Mapping[str, torch.Tensor],
            device: torch.device, dry: bool, failed: dict[str, str]) -> Plan:
    places = _targets(load, targets)._replace(dry=dry)
    require_memory(places.tensors)
    left_out: set[str] = set()
    for _ in range(_MOST_RUNS):
        offered = {name: meta for name, meta in catalog.items() if name not in left_out}
        run = _run(load, offered, places, device)
        if not run.left_out:
            break
        if run.raised is not None:
            failed.update(dict.fromkeys(run.left_out, run.raised))
        left_out |= _families(run.left_out, offered)
        if len(left_out) == len(catalog):
            return _all_opaque(catalog)
    else:
        return _all_opaque(catalog)
    events = run.recorder.events
    opaque = demoted(events, places.tensors, run.recorder.opaque | left_out, catalog)
    _refuse(run, places, bool(left_out))
    if opaque and not _repeatable(load, catalog, places, run.recorder, opaque, left_out):
        return _all_opaque(catalog, run.returned)
    plan = plan_of(events, opaque, catalog, run.returned)
    return plan if run.sets is None else replace(plan, replayable=False)


def _run(load: Load, offered: Catalog, places: _Targets, device: torch.device) -> _Run:
    """Runs the loader once. Returns what it did and left behind."""
    recorder = Recorder(places.tensors, device, dry=places.dry)
    attributes = Attributes(places.watched)
    returned, left_out, raised = None, frozenset[str](), None
    try:
        with torch.no_grad(), recorder:
            returned = _names(load(recorder.tensors(offered)))
    except NeedsData as need:
        left_out = need.names
    except Exception as why:
        if recorder.last is None:
            raise
        left_out, raised = frozenset([recorder.last]), f"{type(why).__name__}: {why}"
    finally:
        if places.module is not None:
            recorder.opaque |= _put_back(places.module, places.tensors)
        recorder.end()
    left_out = left_out or frozenset(recorder.asked)
    if left_out:
        attributes.put_back(Traced)
        return _Run(recorder, left_out=left_out, raised=raised)
    return _left_behind(_Run(recorder, returned), attributes)


def _left_behind(run: _Run, attributes: Attributes) -> _Run:
    sets, effect = None, run.recorder.uses.changed
    try:
        sets = attributes.compare()
    except Unrecordable as why:
        effect = str(why)
        attributes.put_back(Traced)
    kept = still_held(Traced, run.recorder)
    if effect is None and kept:
        effect = f"it keeps {kept[0]!r}"
    return run._replace(sets=sets, effect=effect)


def _refuse(run: _Run, places: _Targets, something_unseen: bool) -> None:
    """Raises Unrecordable when the run did more than write to targets. It may compute from targets
    that it does not fill (maps of experts).
    """
    if run.effect is not None:
        raise Unrecordable(run.effect)
    filled = {storage_key(places.tensors[event.parameter]) for event in run.recorder.events
              if event.parameter and (isinstance(event, Write) or event.value is None)}
    for name, why in run.recorder.uses.reads.items():
        tensor = places.tensors[name]
        may_be = something_unseen and (places.module is None
                                       or isinstance(tensor, torch.nn.Parameter))
        if may_be or storage_key(tensor) in filled:
            raise Unrecordable(why)


def _put_back(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Restores parameters that the loader has replaced by a stand-in. Returns the tensors of these
    stand-ins, which become opaque.
    """
    names: set[str] = set()
    for name, tensor in named_targets(module).items():
        if isinstance(tensor, Traced):
            names.update(sources(tensor._value))
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, tensors.get(name))
    return names


def _families(names: Iterable[str], catalog: Catalog) -> set[str]:
    """Returns these tensors, and those of the same dtype whose names differ only by numbers: the
    loader treats them alike.
    """
    kinds = {(re.sub(r"\d+", "#", name), catalog[name].dtype) for name in names if name in catalog}
    return {name for name, meta in catalog.items()
            if (re.sub(r"\d+", "#", name), meta.dtype) in kinds}


def _repeatable(load: Load, catalog: Catalog, places: _Targets, full: Recorder, opaque: set[str],
                left_out: set[str]) -> bool:
    """Whether the loader, given the opaque tensors alone, writes them to the same places as when it
    got all, and writes no other constants.
    """
    alone = {name: meta for name, meta in catalog.items() if name in opaque - left_out}
    try:
        run = _run(load, alone, places, full.device)
    except Exception:
        # The loader failed before it took a tensor. That matters only if it was to take one.
        return not alone
    events = run.recorder.events
    return (not run.left_out and _places(events, opaque) == _places(full.events, opaque)
            and _constants(events) <= _constants(full.events))


def _constants(events: Iterable[Event]) -> set[Event]:
    return {event for event in events if isinstance(event, Fill)}


def _places(events: Iterable[Event], names: set[str]) -> set[tuple[Any, ...]]:
    return {(e.parameter, e.offset, e.size, e.stride, e.sources) for e in events
            if isinstance(e, Write) and e.sources & names}


def _names(returned: Any) -> frozenset[str] | None:
    """Returns the names of parameters that a loader reports as loaded; None: it reports none."""
    if isinstance(returned, (set, frozenset)) and all(isinstance(n, str) for n in returned):
        return frozenset(returned)
    return None


def plan_of(events: Iterable[Event], opaque: set[str], catalog: Catalog,
            loaded: frozenset[str] | None = None) -> Plan:
    """Returns a plan of the constants, and of the writes in which no opaque tensor has a part."""
    flows: dict[tuple[str, Flow], None] = {}
    constants, replayable = [], True
    for event in events:
        if isinstance(event, Fill):
            replayable = replayable and event.value is not None
            if event.value is not None:
                constants.append(Constant(event.parameter, event.offset, event.size, event.stride,
                                          event.value))
        elif opaque.isdisjoint(event.sources):
            for flow in event.flows or ():
                flows[event.parameter, flow] = None
    moves = _moves(flows)
    in_order = [name for name in catalog if name in opaque]
    used = dict.fromkeys(move.name for move in moves) | dict.fromkeys(in_order)
    entries = [Entry(name, tuple(catalog[name].shape), short_name(catalog[name].dtype))
               for name in used]
    return pack(moves, entries, in_order, constants, loaded, replayable)


def _moves(flows: Iterable[tuple[str, Flow]]) -> list[Move]:
    """Returns the moves. A session names a box by its beginning, so boxes of one tensor that begin
    at the same place become one box.
    """
    flows = list(flows)
    whole: set[str] = set()
    while True:
        boxes = [_box(flow, whole) for _, flow in flows]
        extents: dict[tuple[str, Ints], Ints] = {}
        for (_, flow), (start, extent) in zip(flows, boxes):
            before = extents.setdefault((flow.source.name, start), extent)
            if before != extent:
                extents[flow.source.name, start] = tuple(map(max, before, extent))
        moves = [_move(parameter, flow, start, extents[flow.source.name, start])
                 for (parameter, flow), (start, _) in zip(flows, boxes)]
        failed = {flow.source.name for (_, flow), move in zip(flows, moves) if move is None}
        if not failed:
            return [move for move in moves if move is not None]
        whole |= failed


def _box(flow: Flow, whole: set[str]) -> tuple[Ints, Ints]:
    shape = flow.source.shape
    if flow.source.name in whole:
        return (0,) * len(shape), shape
    return _smallest_box(shape, flow.offset, flow.dims)


def _move(parameter: str, flow: Flow, start: Ints, extent: Ints) -> Move | None:
    """Returns the move of a flow. None: the flow is no lattice, and its box has grown to one
    without whole rows.
    """
    placed = _placed(flow.source.shape, flow.offset, flow.dims, (start, extent))
    if placed is None:
        return None
    offset, size, source_stride, stride = placed
    return Move(flow.source.name, start, extent, offset, source_stride, parameter, flow.to, size,
                stride, short_name(flow.dtype))


# A model has many tensors, but few different ways to cut them.
_of_each_way = functools.lru_cache(maxsize=4096)


@_of_each_way
def _lattice(shape: Ints, offset: int, dims: tuple[Dim, ...]) -> Lattice | None:
    return lattice(shape, offset, [d[0] for d in dims], [d[1] for d in dims])


@_of_each_way
def _smallest_box(shape: Ints, offset: int, dims: tuple[Dim, ...]) -> tuple[Ints, Ints]:
    found = _lattice(shape, offset, dims)
    if found is not None:
        return found.start, found.extent(len(shape))
    return rows_around(shape, offset, [d[0] for d in dims], [d[1] for d in dims])


@_of_each_way
def _placed(shape: Ints, offset: int, dims: tuple[Dim, ...], box: tuple[Ints, Ints]
            ) -> tuple[int, Ints, Ints, Ints] | None:
    """Returns (offset in the box, size, stride in the box, stride in the parameter) of a flow, with
    as few dimensions as possible.
    """
    found = _lattice(shape, offset, dims)
    parts = split(dims, found) if found is not None else dims
    placed = inside(shape, box, offset, [d[0] for d in parts], [d[1] for d in parts])
    if placed is None:
        return None
    at, strides = placed
    merged = coalesce([(d[0], s, d[2]) for d, s in zip(parts, strides)])
    size, source_stride, stride = zip(*merged) if merged else ((), (), ())
    return at, size, source_stride, stride
