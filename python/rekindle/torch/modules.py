"""Fills an existing module."""
from __future__ import annotations

import contextlib

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .. import session as sessions
from .._engines.fitting import Contents, Fit
from .._engines.loading import contents_of
from .._staging import RESERVE, Mode, Phases, Staged, Staging, applying, side_stream
from ..errors import Error, InvalidError, NotFoundError
from ..cataloging import catalog as rekindle_catalog
from ..recording.tracer import TensorMeta
from . import conversion, memory
from . import resident as residents

if TYPE_CHECKING:
    from torch import nn

Catalog = Mapping[str, TensorMeta]
# The contents from which load() has filled each module.
_filled: WeakKeyDictionary[nn.Module, Contents] = WeakKeyDictionary()


def load(model: nn.Module, name: str | None = None, version: str | int | None = "latest", *,
         strict: bool = True, convert: bool = False, load_timeout: float | None = 60.0,
         resident: bool | str = False, shared: bool = False,
         resident_changes: Sequence[str] = (), **options: Any) -> sessions.Session:
    """Fills a module's parameters and persistent buffers in place with a version's tensors of the
    same names and shapes.

    Parameters that share memory are filled once, by any of their names. If the version has several
    of these names, the last in the module's order wins, as in `load_state_dict`. Tensors on the
    meta device get memory on `options["device"]`. A transformers model whose checkpoint has other
    names or other cuts (for example a tensor per expert) is filled as by transformers' own loader,
    with its buffers that are not saved, if they are on meta.

    `strict`: NotFoundError when a parameter gets nothing; without it, the parameter keeps its
    values. The same rules hold for a module that was filled before. In addition, other quantization
    settings in config.json raise InvalidError before anything is written. So does, with `strict`, a
    new tensor for which the module has no place.
    `convert`: between dtypes; without it, InvalidError when they differ. `load_timeout`: seconds
    without anything new. `options`: of `rekindle.attach`; the default device is that of all
    parameters, if they share one.
    `resident`: the parameters and buffers lie in memory of the device that outlives this process.
    If a predecessor has left such a copy of the same version, model and environment, the module
    takes it over, checked, and nothing is loaded. Otherwise the module is filled, and after the
    commit its parameters are kept for a successor. A text tells apart what this function cannot see:
    everything else that decides what the bytes mean. Only `load` and `stage` may write to such
    parameters.
    `shared`, with `resident`: several workers of the device read one copy. Nothing may write to the
    parameters after the commit: on a double that ends the process, on a GPU it ends the context. A
    load of another version takes a shared copy of that version, if there is one. Otherwise it gives
    the parameters other memory first, so their addresses change.
    `resident_changes`: regular expressions for whole names of parameters and buffers to which the
    model itself writes while it serves. Their bytes are not compared with those of the seal.

    Returns the session with everything loaded; the caller commits it. Raises what `rekindle.attach`
    and `Session.load_into` raise.
    """
    key = ""
    if shared and not resident:
        raise InvalidError("shared=True without resident=True: only resident parameters are shared")
    if shared and resident_changes:
        raise InvalidError("shared=True with resident_changes: nothing may write to shared parameters")
    if resident:
        device = memory.common_device(model.state_dict(keep_vars=True).values())
        options.setdefault("device", device)
        extra = f"{'' if resident is True else resident} convert={convert} strict={strict}"
        key = residents.key_of(model, extra, options)
        taken = residents.take(model, name, version, key, options, shared)
        if taken is not None:
            # Not before the commit, which this worker may be waited for.
            taken.after_commit(lambda: _remember(model, taken, options))
            return taken
    declared = _declare(model, name, version, strict, convert, load_timeout, options)
    session = declared.attach(False)
    try:
        declared.fill(session)
        if resident:
            residents.place(model, session, key, shared, resident_changes)
    except BaseException:
        session.close()
        raise
    return session


def tensors_of(model: nn.Module) -> Catalog:
    """Returns the tensors of the version that fills the module; none if that is not known."""
    contents = _filled.get(model)
    return {} if contents is None else contents.tensors


def catalog_for(name: str | None, version: str | int | None, options: Mapping[str, Any]) -> Any:
    """Returns the catalog of a version, by those of a load's options that tell where it is."""
    where = {key: options[key] for key in ("agent", "fallback_dir", "timeout") if key in options}
    return rekindle_catalog(name, version, **where)


def _remember(model: nn.Module, session: sessions.Session, options: Mapping[str, Any]) -> None:
    with contextlib.suppress(Error):
        _filled[model] = contents_of(catalog_for(session.model, session.version, options))


def stage(model: nn.Module, name: str | None = None, version: str | int | None = "latest", *,
          staging: Mode = "auto", reserve_bytes: int = RESERVE, strict: bool = True,
          convert: bool = False, load_timeout: float | None = 60.0,
          **options: Any) -> "StagedVersion":
    """Checks that a version fits a module that serves, and begins to take it into memory beside it.
    The module goes on to serve; `StagedVersion.switch` then loads the version.

    `staging`: "auto": if the device has no room, the version is loaded by `switch` alone, and
    `reason` says why; "require": ExhaustedError instead; "off": never staged. `reserve_bytes` of
    the device stay free. Other arguments are those of `load`, with which it shares the rules. With
    an instance of several ranks, give the next generation.
    """
    phases = Phases()
    with phases.measure("declare"):
        declared = _declare(model, name, version, strict, convert, load_timeout, options)
        staged = Staged(declared.attach, Staging(staging, reserve_bytes), load_timeout, phases)
    return StagedVersion(declared, staged, phases)


class StagedVersion:
    """A version beside a module that serves. For one thread."""

    def __init__(self, declared: "_Declared", staged: Staged, phases: Phases) -> None:
        """Called by `stage`."""
        self._declared, self._staged, self._phases = declared, staged, phases

    @property
    def reason(self) -> str | None:
        """Why `switch` loads everything by itself; None: the version is staged, or still may be."""
        return self._staged.reason

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far: "declare", "copy", "apply", "resume"."""
        return self._staged.phases

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every byte is staged, or until `reason` says why none will be. False: it took
        longer than `timeout` seconds."""
        return self._staged.wait(timeout)

    def switch(self, resume: Callable[[], Any] | None = None,
               commit_timeout: float | None = 60.0) -> sessions.Session:
        """Loads the version into the module, commits, and calls `resume`. Nothing may use the
        module meanwhile. If bytes are still on their way, it waits for them before the first write.

        Returns the session; close that of the earlier version. Raises what `load` and
        `Session.commit` raise. After a failed `load_into` the module may have weights of two
        versions; the instance is not ready then.
        """
        self._staged.wait(None)
        with self._phases.measure("apply"):
            session = self._staged.take()
        try:
            with self._phases.measure("apply"), applying(session):
                self._declared.fill(session)
            self._phases.report(session)
            with self._phases.measure("resume"):
                session.commit(commit_timeout)
                if resume is not None:
                    resume()
        except BaseException:
            session.close()
            raise
        self._phases.report(session)
        return session

    def close(self) -> None:
        """Gives the version up. The module keeps its weights."""
        self._staged.close()

    def __enter__(self) -> "StagedVersion":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class _Declared(NamedTuple):
    """A version that fits a module. `attach`: its argument says whether the session is staged;
    keywords replace options of `rekindle.attach`."""
    version: int
    attach: Callable[..., sessions.Session]
    fill: Callable[[sessions.Session], None]


def _declare(model: nn.Module, name: str | None, version: str | int | None, strict: bool,
             convert: bool, load_timeout: float | None, options: dict[str, Any]) -> _Declared:
    whole = catalog_for(name, version, options)
    contents, name, number = contents_of(whole), whole.model, whole.version
    before = _filled.get(model)
    if before is not None and before.model != name:
        before = None
    fit = Fit(model, contents, serving=before is not None and strict, before=before,
              pass_over="ask for strict=False")
    fit.check_quantization()
    plan = _planned(model, name, number, fit, strict, convert, load_timeout, options)

    def attach(staged: bool, **more: Any) -> sessions.Session:
        stream = {} if not staged else side_stream(plan.options.get("device"))
        return sessions.attach(name, number, staged=staged, **{**plan.options, **stream, **more})

    def fill(session: sessions.Session) -> None:
        residents.leave(model, session)
        plan.fill(session)
        _filled[model] = contents
        session.after_commit(lambda: residents.seal(model, session, contents.tensors))

    return _Declared(number, attach, fill)


def _planned(model: nn.Module, name: str, number: int, fit: Fit, strict: bool, convert: bool,
             load_timeout: float | None, options: dict[str, Any]) -> conversion.Planned:
    catalog = fit.new.tensors
    targets, missing = _by_name(model, catalog)
    if conversion.is_pretrained(model) and (missing or _meta_buffers(model)):
        return conversion.plan(model, name, number, fit, strict, convert, load_timeout, options)
    if strict and missing:
        raise NotFoundError(f"{name}@{number} has nothing for {memory.some(missing)} of the model; "
                            "strict=False leaves them as they are")
    if _meta_buffers(model):
        raise InvalidError(f"{memory.some(_meta_buffers(model))} is not saved with the model and "
                           "on the meta device: build the model, or its buffers, on a real one")
    _check(targets, fit.new, convert)
    fit.check_unread(model.state_dict(keep_vars=True))
    if strict or not missing:
        memory.materialize(model, options.get("device"))
        targets, _ = _by_name(model, catalog)
    options.setdefault("device", memory.common_device(targets.values()))
    return conversion.Planned(options, lambda session: session.load_into(
        targets, strict=False, timeout=load_timeout))


def _by_name(model: nn.Module, catalog: Catalog) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the model's tensors by the catalog's names, and the names that the catalog lacks."""
    state = {name: value for name, value in model.state_dict(keep_vars=True).items()
             if isinstance(value, torch.Tensor)}
    found: dict[int, str] = {}
    for name, value in state.items():
        if name in catalog:
            # The last name wins, as in load_state_dict.
            found[memory.identity(value)] = name
    targets = {name: state[name] for name in found.values()}
    return targets, [name for name, value in state.items() if memory.identity(value) not in found]


def _check(targets: Mapping[str, torch.Tensor], new: Contents, convert: bool) -> None:
    for name, value in targets.items():
        meta = new.tensors[name]
        if tuple(value.shape) != meta.shape:
            raise InvalidError(f"{name} has shape {list(meta.shape)} in {new} and "
                               f"{list(value.shape)} in the model")
        if value.dtype != meta.dtype and not convert:
            raise InvalidError(f"{name} is {meta.dtype} in {new} and {value.dtype} in the model: "
                               "change the model's, or ask for convert=True")


def _meta_buffers(model: nn.Module) -> list[str]:
    """Buffers that are not saved and have no values yet."""
    saved = model.state_dict(keep_vars=True).keys()
    return [name for name, buffer in model.named_buffers(remove_duplicate=False)
            if buffer.is_meta and name not in saved]
