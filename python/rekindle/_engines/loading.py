"""Fills an engine's model as its own loader would: with the same elements, at the same places."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import _abi, _attaching, _files, standby
from .._staging import Phases, Staged, Staging, applying, side_stream
from ..boxes import Box
from ..cataloging import Catalog, catalog
from ..errors import Error, InternalError, InvalidError
from ..recording.cache import cached, fingerprint
from ..recording.effects import Unrecordable, require_memory
from ..recording.execute import boxes as boxes_of
from ..recording.execute import catalog_of, execute
from ..recording.plan import Plan
from ..recording.recorder import record_or_refuse
from ..recording.targets import named_targets
from ..session import Session, attach
from .completeness import check_loaded, check_plan
from .fitting import CONFIGS, Contents, Fit, Handed, quantization_of
from .options import Options
from .ranks import ABOUT_WEIGHTS, ONE, Ranks
from .reading import whole_tensors
from .writes import ConversionWatch

logger = logging.getLogger("rekindle")
# How long an agent on this host may take to answer.
_ANSWER_S = 0.5

Pairs = Iterable[tuple[str, torch.Tensor]]
# An engine's loader: takes (name, tensor) pairs, and may return the names of loaded parameters.
Load = Callable[[Pairs], Any]


@dataclass(frozen=True)
class Place:
    """The rank and instance that attach. `key`: everything else that decides the loader's choice of
    slices: model configuration, sizes and ranks of every kind of parallelism, quantization."""

    instance: str | None = None
    generation: int | None = None
    rank: int | None = None
    world: int | None = None
    key: Mapping[str, Any] = field(default_factory=dict)


# A worker without an instance, even where the environment names one.
ALONE = Place("", 0, 0, 1)


def said_place(options: Options) -> Place:
    """Returns instance and generation by the options, or else the environment; ALONE where neither
    names an instance. A generation of None: `of_one_generation` decides.

    A standby first waits for its turn: on all ranks, because those that wait for others in a
    collective call would give up. InvalidError when the environment's generation is not a
    number."""
    standby.wait()
    instance = options.instance or _attaching.environment("INSTANCE")
    if instance is None:
        return ALONE
    generation = options.generation
    if generation is None and _attaching.environment("GENERATION") is not None:
        generation = _attaching.number(None, "GENERATION", 0)
    return Place(instance, generation)


@dataclass(frozen=True)
class Wanted:
    """What a model gets of a version."""

    options: Options
    place: Place
    device: str | None
    boxes: list[Box] | None  # None: whole tensors
    # The names of the tensors that are read.
    names: frozenset[str]
    # The contents of the version. A plan fits every version with equal contents.
    contents: Contents

    def attach(self, staged: bool = False) -> Session:
        """Raises what `rekindle.attach` raises."""
        return attached(self.options, self.place, self.device, self.boxes, staged)


@dataclass
class Held:
    """The version that fills a model of this process. The session stays attached, so that the fleet
    knows of the worker and an update can find it."""

    wanted: Wanted
    session: Session
    # Why the model has weights of two versions, after a failed update.
    torn: str | None = None

    @property
    def options(self) -> Options:
        return self.wanted.options

    @property
    def place(self) -> Place:
        return self.wanted.place

    @property
    def device(self) -> str | None:
        return self.wanted.device

    @property
    def boxes(self) -> list[Box] | None:
        return self.wanted.boxes

    @property
    def names(self) -> frozenset[str]:
        return self.wanted.names

    @property
    def contents(self) -> Contents:
        return self.wanted.contents


# The key is the role: "target", "draft", or "draft.1" if there are several drafts.
_held: dict[str, Held] = {}


def held(role: str) -> Held | None:
    """Returns the version that fills this process' model; None when it is not from Rekindle."""
    return _held.get(role)


def every_held() -> dict[str, Held]:
    """Returns the versions that fill the models of this process, by role."""
    return dict(_held)


def hold(role: str, what: Held) -> None:
    """Stores what a model was filled from. Closes the session before, unless it is the same."""
    before, _held[role] = _held.get(role), what
    if before is not None and before.session is not what.session:
        before.session.close()


def newer_version(now: Held, timeout: float) -> int | None:
    """Returns the version to move to: in a group, that of an update that has begun, else a newer
    one; None when there is none in `timeout` seconds.

    The agent answers a waiting session only when there is news. It knows updates of a group, so
    half a second is enough for its answer. For a newer version, the fleet is asked as well."""
    group = now.options.group is not None
    found = now.session.wait_for_update(max(timeout, _ANSWER_S) if group else timeout)
    if found is not None or group:
        return found
    try:
        newest = _catalog(replace(now.options, version="latest")).version
    except Error as why:
        logger.info("rekindle: the newest version of %s is not known: %s", now.options.name, why)
        return None
    return newest if newest > now.session.version else None


def let_go(role: str) -> None:
    """Closes the session of a model that now has weights from elsewhere."""
    before = _held.pop(role, None)
    if before is not None:
        before.session.close()


def attached(options: Options, place: Place, device: str | None,
             boxes: list[Box] | None = None, staged: bool = False) -> Session:
    """Returns a session with these options. Raises what `attach` raises."""
    stream = side_stream(device) if staged else {}
    return attach(options.name, options.version, shard=boxes, instance=place.instance,
                  generation=place.generation, rank=place.rank, world=place.world,
                  group=options.group, device=device, bucket_bytes=options.bucket_bytes,
                  fallback_dir=options.fallback_dir, agent=options.agent,
                  staged=staged, timeout=options.attach_timeout, **stream)


def fill(model: torch.nn.Module, load: Load, options: Options, place: Place,
         loaders: list[Any] | None, role: str = "target", ranks: Ranks = ONE,
         update: "Update | None" = None) -> Held:
    """Fills `model` as `load` would, checks that nothing is missing, and commits.

    `loaders`: objects whose source decides what `load` does. None: plans are not cached, because
    `place.key` does not cover everything that decides. `ranks`: all ranks that fill a part of the
    model. When one fails, all raise, and none is committed. `update`: the model serves already.
    InvalidError names parameters that are not written, or tensors that do not fit. Also raises what
    `attach` raises."""
    return finish(declare(model, load, options, place, loaders, ranks, update), role, ranks, update)


def declare(model: torch.nn.Module, load: Load, options: Options, place: Place,
            loaders: list[Any] | None, ranks: Ranks, update: "Update | None",
            staging: Staging = Staging("off")) -> Next:
    """The first part of `fill`, with its arguments: checks everything, and writes nothing. With
    `staging`, the bytes come from now on; `finish` then loads them."""
    def prepare() -> Ready:
        prepared = _prepared(model, load, options, place, loaders, update)
        return Ready(prepared.wanted,
                     lambda session: _write(model, load, prepared, session))
    return begin(prepare, ranks, staging)


@dataclass
class Update:
    """An update by `fill` of a model that serves."""

    # The contents of the model's present version, if known.
    before: Contents | None
    # True: some of the model's memory may have been written.
    begun: bool = False


@dataclass(frozen=True)
class Ready:
    """What a model gets next, and how it is written."""

    wanted: Wanted
    write: Callable[[Session], Any]


@dataclass(frozen=True)
class Next:
    """The version that a model gets next: it fits, and its bytes may be on their way."""

    ready: Ready
    staged: Staged
    phases: Phases

    @property
    def wanted(self) -> Wanted:
        return self.ready.wanted


def begin(prepare: Callable[[], Ready], ranks: Ranks, staging: Staging) -> Next:
    """Declares the next version on all ranks, or on none. What serves is not touched."""
    def step() -> Next:
        phases = Phases()
        with phases.measure("declare"):
            ready = prepare()
            staged = Staged(ready.wanted.attach, staging, ready.wanted.options.load_timeout, phases)
        return Next(ready, staged, phases)
    return ranks.together(step, lambda made: made.staged.close())


def finish(following: Next, role: str, ranks: Ranks, update: Update | None = None) -> Held:
    """Writes the next version over what serves, on all ranks, and commits. The engine is paused.

    If bytes are still on their way, it waits for them before the first write."""
    wanted, phases = following.wanted, following.phases
    try:
        ranks.together(lambda: following.staged.wait(None))
        with phases.measure("apply"):
            session = ranks.together(following.staged.take, lambda made: made.close())
    except BaseException:
        following.staged.close()
        raise
    try:
        if update is not None:
            update.begun = True
        with phases.measure("apply"), applying(session):
            ranks.together(lambda: following.ready.write(session))
        phases.report(session)
        with phases.measure("resume"):
            ranks.together(lambda: session.commit(wanted.options.commit_timeout))
            found = Held(wanted, session)
            hold(role, found)
    except BaseException:
        session.close()
        raise
    phases.report(session)
    return found


@dataclass(frozen=True)
class _Prepared:
    """What to read."""

    plan: Plan | None  # None: whole tensors
    wanted: Wanted
    fit: Fit
    # Records again, and writes what the dry recording of a model that serves did not write.
    again: Callable[[], Plan | None] | None = None


def _prepared(model: torch.nn.Module, load: Load, options: Options, place: Place,
              loaders: list[Any] | None, update: Update | None) -> _Prepared:
    device = device_of(model, options)
    contents = read_contents(options)
    options = _pinned(options, contents.version)
    fit = _fit(model, contents, options, update is not None, update.before if update else None)
    fitted = _fitted(load, fit, place, loaders, options.record)
    plan = fitted if options.record else None
    boxes = boxes_of(plan) if plan is not None else None
    if boxes == []:
        raise InvalidError(f"{contents} has no tensor that this model's loader reads")
    names = contents.tensors.keys() if plan is None else [entry.name for entry in plan.entries]
    wanted = Wanted(options, place, device, boxes, frozenset(names), contents)
    again = None
    if update is not None and plan is not None and not plan.replayable:
        again = lambda: _recorded(load, fit, place, loaders, {}, dry=False)  # noqa: E731
    return _Prepared(plan, wanted, fit, again)


def again(model: torch.nn.Module, load: Load, options: Options, place: Place, now: Held | None,
          layout: AbstractContextManager[Any] | None = None) -> Held:
    """Returns a session for other weights of a model that serves, and does not touch the model. The
    boxes are those of `now` if the version has the same contents, else those of a new recording of
    `load`. `layout`: a context in which the model is as `load` finds it.

    InvalidError names a tensor of the version that does not fit the model, or what is missing."""
    wanted = wanted_again(model, load, options, place, now, layout)
    return Held(wanted, wanted.attach())


def wanted_again(model: torch.nn.Module, load: Load, options: Options, place: Place,
                 now: Held | None, layout: AbstractContextManager[Any] | None = None) -> Wanted:
    """Returns what `again` attaches to."""
    if now is not None and now.options.name != options.name:
        now = None
    device = now.device if now is not None else device_of(model, options)
    contents = read_contents(options)
    options = _pinned(options, contents.version)
    if now is not None and now.contents.same_as(contents):
        boxes, names = now.boxes, now.names
    else:
        fit = _fit(model, contents, options, True, now.contents if now is not None else None)
        fit.check_quantization()
        on = _record_device(model)
        with layout or nullcontext():
            plan = _fitted(load, fit, place, None, True, on)
        if not options.record:
            plan = None
        boxes = boxes_of(plan) if plan is not None else None
        names = frozenset(contents.tensors if plan is None else (
            entry.name for entry in plan.entries))
    return Wanted(options, place, device, boxes, names, contents)


def _fit(model: torch.nn.Module, contents: Contents, options: Options, serving: bool,
         before: Contents | None) -> Fit:
    return Fit(model, contents, options.allow_unwritten, options.allow_unread, serving, before)


def _fitted(load: Load, fit: Fit, place: Place, loaders: list[Any] | None, record: bool,
            device: torch.device | None = None) -> Plan | None:
    """Returns the plan for a version that fits the model; None for whole tensors. First loads and
    updates follow one rule, but an update records even where a first load would not, to check the
    version."""
    failed: dict[str, str] = {}
    same = fit.before is not None and fit.before.same_as(fit.new)
    plan = None
    if record or (fit.serving and not same):
        plan = _recorded(load, fit, place, loaders, failed, dry=fit.serving, device=device)
    if plan is not None or fit.serving:
        fit.check(plan, failed)
    return plan


def _write(model: torch.nn.Module, load: Load, prepared: _Prepared, session: Session) -> None:
    plan, options = prepared.plan, prepared.wanted.options
    if plan is not None and prepared.again is not None:
        plan = prepared.again()
    if plan is None:
        _fill_whole(load, prepared.fit, options, session)
    else:
        opaque = _Opaque(load, prepared.fit)
        execute(plan, opaque, model, session, timeout=options.load_timeout)
        check_plan(model, plan, opaque.returned, options.allow_unwritten, str(prepared.fit.new))
    session.loaded()


def device_of(model: torch.nn.Module, options: Options) -> str | None:
    """Returns the model's device for `attach`; None: host memory, or several devices."""
    if options.device is not None:
        return options.device
    devices = {tensor.device for tensor in model.parameters()}
    return str(devices.pop()) if {device.type for device in devices} == {"cuda"} and len(
        devices) == 1 else None


def one_version(options: Options, ranks: Ranks) -> Options:
    """Returns `options` with the version that the first of several ranks finds to be the newest. If
    each rank asked by itself, a publication in between could give them different versions.

    All ranks call it. All raise the error of the first rank."""
    if options.version != "latest":
        return options
    said: Any = None
    if ranks.rank == 0:
        try:
            said = _catalog(options).version
        except Error as why:
            said = why
        except Exception as why:
            # The other ranks wait for this rank's answer, so every error becomes one.
            said = InternalError(f"{type(why).__name__}: {why}")
    said = ranks.first(said)
    if isinstance(said, Error):
        raise said
    return _pinned(options, said)


def of_one_generation(place: Place, ranks: Ranks, now: Held | None = None) -> Place:
    """Returns `place` with one generation for all ranks of a start, later than that of any start or
    update before. All ranks call it."""
    generation = place.generation
    if generation is None:
        generation = time.time_ns() // 1_000_000
    if now is not None and now.place.generation is not None:
        generation = max(generation, now.place.generation + 1)
    agreed = ranks.first(generation)
    return replace(place, generation=agreed) if place.instance else place


def _pinned(options: Options, version: int) -> Options:
    """Returns `options` with one version for everything that a load reads."""
    return replace(options, version=version)


def _catalog(options: Options) -> Catalog:
    return catalog(options.name, options.version, fallback_dir=options.fallback_dir,
                   agent=options.agent, timeout=options.attach_timeout)


def read_contents(options: Options) -> Contents:
    """Returns the contents of the version of these options. Raises what `attach` raises."""
    found = _catalog(options)
    return contents_of(found)


def contents_of(found: Catalog) -> Contents:
    """Returns the contents of a version. Raises what `attach` raises."""
    names = [_abi.FILE_PREFIX + name for name in CONFIGS if name in found.file_names]
    files = _files.read(found.agent, f"{found.model}@{found.version}", names)
    return Contents(found.model, found.version, catalog_of(found.tensors), quantization_of(files))


def _record_device(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _recorded(load: Load, fit: Fit, place: Place, loaders: list[Any] | None,
              failed: dict[str, str], *, dry: bool,
              device: torch.device | None = None) -> Plan | None:
    """Returns a plan. None: a plan cannot express what the loader does. It gets whole tensors
    then."""
    model, catalog = fit.model, fit.new.tensors
    on = device or _record_device(model)

    def make() -> Plan:
        return record_or_refuse(load, catalog, model, device=on, dry=dry, failed=failed)

    try:
        if loaders is None:
            return make()
        require_memory(named_targets(model))  # a fingerprint needs their shapes
        key = fingerprint(catalog, model, loaders, place.key, record_device=on)
        return cached(key, make)
    except Unrecordable as why:
        logger.info("rekindle: %s is given whole tensors: its loader is more than a recording can "
                    "stand for: %s", type(model).__name__, why)
        return None


class _Opaque:
    """Calls a loader with the opaque tensors, and keeps its result."""

    def __init__(self, load: Load, fit: Fit) -> None:
        self._load, self._fit = load, fit
        self.returned: Any = None

    def __call__(self, pairs: Pairs) -> Any:
        self.returned, _ = _loaded(self._load, pairs, self._fit)
        return self.returned


def _fill_whole(load: Load, fit: Fit, options: Options, session: Session) -> None:
    returned, handed = _loaded(load, whole_tensors(session, options.load_timeout), fit)
    for _ in handed:
        # A loader may stop before the end, but all tensors must be handed out.
        pass
    check_loaded(fit.model, returned, options.allow_unwritten, str(fit.new))


def _loaded(load: Load, pairs: Pairs, fit: Fit) -> tuple[Any, Handed]:
    """Calls a loader. InvalidError names the tensor at which it failed."""
    handed = Handed(pairs)
    try:
        with ConversionWatch(fit.model):
            return load(handed), handed
    except Exception as why:
        explained = handed.explained(why, fit)
        if explained is why:
            raise
        raise explained from why


def is_about_weights(error: BaseException) -> bool:
    """Whether a fallback helps: the weights are not available. It does not help against a wrong
    configuration, or a model that the weights do not fit."""
    return isinstance(error, Error) and error.name in ABOUT_WEIGHTS
