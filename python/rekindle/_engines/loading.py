"""Fills an engine's model with what its own loader reads of this rank's tensors, where it puts it."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..boxes import Box
from ..catalog import catalog
from ..errors import Error, InvalidError
from ..recording.cache import cached, fingerprint
from ..recording.execute import boxes as boxes_of
from ..recording.execute import catalog_of, execute
from ..recording.plan import Plan
from ..recording.recorder import record
from ..recording.targets import named_targets
from ..recording.tracer import TensorMeta
from ..session import Session, attach
from .completeness import check_loaded, check_plan
from .effects import EffectWatch, Unrecordable
from .options import Options
from .reading import whole_tensors

logger = logging.getLogger("rekindle")

# An engine's loader: takes (name, tensor) pairs, may say which parameters it has loaded.
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class Place:
    """Which rank of which instance attaches. `key`: what else the loader's choice of slices depends
    on: model configuration, sizes and ranks of every kind of parallelism, quantization."""

    instance: str | None = None
    generation: int | None = None
    rank: int | None = None
    world: int | None = None
    key: Mapping[str, Any] = field(default_factory=dict)


ALONE = Place("", 0, 0, 1)  # also where the environment names an instance


@dataclass
class Held:
    """What a model of this process was filled from. The session stays attached, so that the fleet
    knows of the worker and an update can find it."""

    options: Options
    place: Place
    device: str | None
    session: Session
    boxes: list[Box] | None  # None: whole tensors
    names: frozenset[str]  # of the tensors that were read


_held: dict[str, Held] = {}  # by role: "target", "draft"


def held(role: str) -> Held | None:
    """What this process' model has been filled from, None when it was not by Rekindle."""
    return _held.get(role)


def hold(role: str, what: Held) -> None:
    """Lets go of what was held before, if it is something else."""
    before, _held[role] = _held.get(role), what
    if before is not None and before.session is not what.session:
        before.session.close()


def attached(options: Options, place: Place, device: str | None,
             boxes: list[Box] | None = None) -> Session:
    """A session of these options; raises what `attach` raises."""
    return attach(options.name, options.version, shard=boxes, instance=place.instance,
                  generation=place.generation, rank=place.rank, world=place.world,
                  group=options.group, device=device, bucket_bytes=options.bucket_bytes,
                  fallback_dir=options.fallback_dir, agent=options.agent,
                  timeout=options.attach_timeout)


def fill(model: torch.nn.Module, load: Load, options: Options, place: Place,
         loaders: list[Any] | None, role: str = "target") -> Held:
    """Fills `model` by what `load` does, checks that nothing is missing, and commits.

    `loaders`: things whose source decides what `load` does; None: plans are not cached, because
    `place.key` cannot say what else decides.
    Raises InvalidError naming parameters that are not written, and what `attach` raises."""
    device = device_of(model, options)
    catalog, version = _catalog(options)
    options = _pinned(options, version)
    plan = _plan(model, load, catalog, place, loaders) if options.record else None
    boxes = boxes_of(plan) if plan is not None else None
    if boxes == []:
        raise InvalidError(f"{options.name}@{version} has no tensor that this model's loader reads")
    session = attached(options, place, device, boxes)
    try:
        if plan is None:
            names = _fill_whole(model, load, options, session)
        else:
            opaque = _Returned(load)
            execute(plan, opaque, model, session, timeout=options.load_timeout)
            check_plan(model, plan, opaque.returned, options.allow_unwritten)
            names = frozenset(entry.name for entry in plan.entries)
        session.loaded()
        session.commit(options.commit_timeout)
    except BaseException:
        session.close()
        raise
    filled = Held(options, place, device, session, boxes, names)
    hold(role, filled)
    return filled


def device_of(model: torch.nn.Module, options: Options) -> str | None:
    """Where the model is, as `attach` takes it; None for the host's memory."""
    if options.device is not None:
        return options.device
    devices = {tensor.device for tensor in model.parameters()}
    return str(devices.pop()) if {device.type for device in devices} == {"cuda"} and len(
        devices) == 1 else None


def one_version(options: Options, first: bool, agree: Callable[[Any], Any]) -> Options:
    """`options` with the version that the first of several ranks finds to be the newest: each by
    itself could find another one, when one is published meanwhile, and serve a part of it.

    All ranks call it. `agree(value)`: what the first said. Raises, on all, what the first met."""
    if options.version != "latest":
        return options
    said: Any = None
    if first:
        try:
            said = _catalog(options)[1]
        except Error as why:
            said = why
    said = agree(said)
    if isinstance(said, Error):
        raise said
    return _pinned(options, said)


def _pinned(options: Options, version: int) -> Options:
    """All that is read of one load is of one version."""
    return replace(options, version=version)


def _catalog(options: Options) -> tuple[dict[str, TensorMeta], int]:
    found = catalog(options.name, options.version, fallback_dir=options.fallback_dir,
                    agent=options.agent, timeout=options.attach_timeout)
    return catalog_of(found.tensors), found.version


def _plan(model: torch.nn.Module, load: Load, catalog: Mapping[str, TensorMeta],
          place: Place, loaders: list[Any] | None) -> Plan | None:
    """None when the loader does more than a plan can say: it is given whole tensors then."""
    problems: list[str] = []
    attributes: list[str] = []
    reads: dict[str, str] = {}

    def watched(pairs: Iterable[tuple[str, torch.Tensor]]) -> Any:
        try:
            with EffectWatch(model) as watch:
                returned = load(pairs)
            attributes.extend([watch.sets] if watch.sets else [])
            reads.update(watch.reads)
            return returned
        except Unrecordable as why:
            problems.append(str(why))
            return None

    def make() -> Plan:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        plan = record(watched, catalog, model, device=device)
        problems.extend(why for name, why in reads.items() if name in _filled(model, plan))
        if problems:
            raise Unrecordable(problems[0])
        return replace(plan, replayable=plan.replayable and not attributes)

    try:
        EffectWatch(model)
        if loaders is None:
            return make()
        key = fingerprint(catalog, model, loaders, place.key)
        return cached(key, make)
    except Unrecordable as why:
        logger.info("rekindle: %s is given whole tensors: its loader is more than a recording can "
                    "stand for: %s", type(model).__name__, why)
        return None


def _filled(model: torch.nn.Module, plan: Plan) -> set[str]:
    """All names of what the loader writes to; every parameter, where that is not followed."""
    tensors = named_targets(model)
    written = {tensors[move.parameter].untyped_storage()._cdata for move in plan.moves()}
    if plan.opaque:
        written.update(p.untyped_storage()._cdata for p in model.parameters())
    return {name for name, tensor in tensors.items() if tensor.untyped_storage()._cdata in written}


class _Returned:
    """Calls a loader, and keeps what it returns."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.returned: Any = None

    def __call__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Any:
        self.returned = self._load(pairs)
        return self.returned


def _fill_whole(model: torch.nn.Module, load: Load, options: Options,
                session: Session) -> frozenset[str]:
    names = frozenset(info.name for info in session.tensors())
    pairs = whole_tensors(session, options.load_timeout)
    returned = load(pairs)
    for _ in pairs:  # a loader may stop before the end
        pass
    check_loaded(model, returned, options.allow_unwritten)
    return names


def is_about_weights(error: BaseException) -> bool:
    """Whether a fall-back helps: the weights cannot be had, as opposed to a wrong configuration or
    a model that they do not fit."""
    return isinstance(error, Error) and error.name in (
        "NOT_FOUND", "TIMEOUT", "PEER_LOST", "STALE", "CORRUPT", "EXHAUSTED", "UNAVAILABLE")
