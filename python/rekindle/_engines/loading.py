"""Fills an engine's model with what its own loader reads of a rank's tensors, where it puts it."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import _attaching
from ..boxes import Box
from ..catalog import catalog
from ..errors import Error, InternalError, InvalidError
from ..recording.cache import cached, fingerprint
from ..recording.effects import Unrecordable, require_memory
from ..recording.execute import boxes as boxes_of
from ..recording.execute import catalog_of, execute
from ..recording.plan import Plan
from ..recording.recorder import record_or_refuse
from ..recording.targets import named_targets
from ..recording.tracer import TensorMeta
from ..session import Session, attach
from .completeness import check_loaded, check_plan
from .options import Options
from .ranks import ABOUT_WEIGHTS, ONE, Ranks
from .reading import whole_tensors

logger = logging.getLogger("rekindle")

Pairs = Iterable[tuple[str, torch.Tensor]]
# An engine's loader: takes (name, tensor) pairs, may say which parameters it has loaded.
Load = Callable[[Pairs], Any]


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


def said_place(options: Options) -> Place:
    """Instance and generation, by the options or else the environment; ALONE where neither names an
    instance. A generation of None: `of_one_generation` decides.

    InvalidError when the environment's generation is not a number."""
    instance = options.instance or _attaching.environment("INSTANCE")
    if instance is None:
        return ALONE
    generation = options.generation
    if generation is None and _attaching.environment("GENERATION") is not None:
        generation = _attaching.number(None, "GENERATION", 0)
    return Place(instance, generation)


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
    torn: str | None = None  # why the model has weights of two versions, after an update failed


_held: dict[str, Held] = {}  # by role: "target", "draft", "draft.1" of several


def held(role: str) -> Held | None:
    """What this process' model has been filled from, None when it was not by Rekindle."""
    return _held.get(role)


def every_held() -> dict[str, Held]:
    """What the models of this process have been filled from, by role."""
    return dict(_held)


def hold(role: str, what: Held) -> None:
    """Lets go of what was held before, if it is something else."""
    before, _held[role] = _held.get(role), what
    if before is not None and before.session is not what.session:
        before.session.close()


def let_go(role: str) -> None:
    """The model has other weights now, that are not Rekindle's."""
    before = _held.pop(role, None)
    if before is not None:
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
         loaders: list[Any] | None, role: str = "target", ranks: Ranks = ONE) -> Held:
    """Fills `model` by what `load` does, checks that nothing is missing, and commits.

    `loaders`: things whose source decides what `load` does; None: plans are not cached, because
    `place.key` cannot say what else decides. `ranks`: all that call this for a part of the model;
    when it fails on one, it does on all, and none is committed.
    Raises InvalidError naming parameters that are not written, and what `attach` raises."""
    plan, found = ranks.together(lambda: _prepared(model, load, options, place, loaders),
                                 lambda made: made[1].session.close())
    try:
        ranks.together(lambda: _write(model, load, plan, found))
        ranks.together(lambda: found.session.commit(options.commit_timeout))
    except BaseException:
        found.session.close()
        raise
    hold(role, found)
    return found


def _prepared(model: torch.nn.Module, load: Load, options: Options, place: Place,
              loaders: list[Any] | None) -> tuple[Plan | None, Held]:
    """What will be read, and the session for it; None: whole tensors."""
    device = device_of(model, options)
    catalog, version = _catalog(options)
    options = _pinned(options, version)
    plan = _plan(model, load, catalog, place, loaders) if options.record else None
    boxes = boxes_of(plan) if plan is not None else None
    if boxes == []:
        raise InvalidError(f"{options.name}@{version} has no tensor that this model's loader reads")
    names = catalog.keys() if plan is None else [entry.name for entry in plan.entries]
    session = attached(options, place, device, boxes)
    return plan, Held(options, place, device, session, boxes, frozenset(names))


def again(model: torch.nn.Module, options: Options, place: Place, now: Held | None) -> Held:
    """A session for other weights of a model that is filled: of what `now` has of it, if that is
    of the same name in Rekindle, else of all."""
    if now is not None and now.options.name != options.name:
        now = None
    device = now.device if now is not None else device_of(model, options)
    boxes = now.boxes if now is not None else None
    session = attached(options, place, device, boxes)
    try:
        names = frozenset(info.name for info in session.tensors())
    except BaseException:
        session.close()
        raise
    return Held(options, place, device, session, boxes, names)


def _write(model: torch.nn.Module, load: Load, plan: Plan | None, found: Held) -> None:
    options, session = found.options, found.session
    if plan is None:
        _fill_whole(model, load, options, session)
    else:
        opaque = _Returned(load)
        execute(plan, opaque, model, session, timeout=options.load_timeout)
        check_plan(model, plan, opaque.returned, options.allow_unwritten)
    session.loaded()


def device_of(model: torch.nn.Module, options: Options) -> str | None:
    """Where the model is, as `attach` takes it; None for the host's memory."""
    if options.device is not None:
        return options.device
    devices = {tensor.device for tensor in model.parameters()}
    return str(devices.pop()) if {device.type for device in devices} == {"cuda"} and len(
        devices) == 1 else None


def one_version(options: Options, ranks: Ranks) -> Options:
    """`options` with the version that the first of several ranks finds to be the newest: each by
    itself could find another one, when one is published meanwhile, and serve a part of it.

    All ranks call it. Raises, on all, what the first met."""
    if options.version != "latest":
        return options
    said: Any = None
    if ranks.rank == 0:
        try:
            said = _catalog(options)[1]
        except Error as why:
            said = why
        except Exception as why:  # the others wait for what is said here
            said = InternalError(f"{type(why).__name__}: {why}")
    said = ranks.first(said)
    if isinstance(said, Error):
        raise said
    return _pinned(options, said)


def of_one_generation(place: Place, ranks: Ranks, now: Held | None = None) -> Place:
    """Same on all ranks of one start, and later than that of any start, or update, before. All
    ranks call it."""
    generation = place.generation
    if generation is None:
        generation = time.time_ns() // 1_000_000
    if now is not None and now.place.generation is not None:
        generation = max(generation, now.place.generation + 1)
    agreed = ranks.first(generation)
    return replace(place, generation=agreed) if place.instance else place


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
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def make() -> Plan:
        return record_or_refuse(load, catalog, model, device=device)

    try:
        if loaders is None:
            return make()
        require_memory(named_targets(model))  # a fingerprint needs their shapes
        key = fingerprint(catalog, model, loaders, place.key, record_device=device)
        return cached(key, make)
    except Unrecordable as why:
        logger.info("rekindle: %s is given whole tensors: its loader is more than a recording can "
                    "stand for: %s", type(model).__name__, why)
        return None


class _Returned:
    """Calls a loader, and keeps what it returns."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.returned: Any = None

    def __call__(self, pairs: Pairs) -> Any:
        self.returned = self._load(pairs)
        return self.returned


def _fill_whole(model: torch.nn.Module, load: Load, options: Options, session: Session) -> None:
    pairs = whole_tensors(session, options.load_timeout)
    returned = load(pairs)
    for _ in pairs:  # a loader may stop before the end
        pass
    check_loaded(model, returned, options.allow_unwritten)


def is_about_weights(error: BaseException) -> bool:
    """Whether a fall-back helps: the weights cannot be had, as opposed to a wrong configuration or
    a model that they do not fit."""
    return isinstance(error, Error) and error.name in ABOUT_WEIGHTS
