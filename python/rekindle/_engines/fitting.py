"""Decides whether a version fits a model, by one rule for the first load and for every update.

A recording of the engine's own loader shows what the loader would do with a version's tensors. It
writes nothing, so an update can be refused before it touches a model that serves.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..dtypes import short_name
from ..errors import Error, InvalidError
from ..recording.targets import named_targets
from ..recording.tracer import TensorMeta
from .completeness import unwritten

if TYPE_CHECKING:
    from ..recording import Plan

_QUANTIZATION = ("quantization_config", "compression_config")
# Files of a checkpoint with quantization settings.
CONFIGS = ("config.json", "hf_quant_config.json")
_PLAIN = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_WHOLE = frozenset((torch.bool, torch.int16, torch.int32, torch.int64))
# Exceptions of loaders at a tensor that they do not know, or that has another shape.
_MAY_BE_MISFITS = (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_SCALES = frozenset((getattr(torch, "float8_e8m0fnu", None),))  # exact in every plain dtype


@dataclass(frozen=True)
class Contents:
    """The contents of a version that decide how it fills a model."""

    model: str
    version: int
    tensors: Mapping[str, TensorMeta]
    # The settings as JSON, or None if no configuration was published.
    quantization: str | None = None

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"

    def same_as(self, other: Contents) -> bool:
        """Whether a plan for one version is valid for the other."""
        return self.tensors == other.tensors and self.quantization == other.quantization


def quantization_of(files: Mapping[str, bytes]) -> str | None:
    """Returns the quantization settings in a version's configuration files as JSON; None: no
    file."""
    found: dict[str, Any] = {}
    for name in CONFIGS:
        try:
            config = json.loads(files[name])
        except (KeyError, ValueError):
            continue
        if name != "config.json":
            found[name] = config
            continue
        found[name] = {}
        for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
            if isinstance(part, dict):
                found[name].update({key: part[key] for key in _QUANTIZATION if part.get(key)})
    return json.dumps(found, sort_keys=True) if found else None


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers keep their meaning in a copy from one dtype to the other. Between quantized
    and plain dtypes they do not: the copy would lose a scale."""
    if source == target or (source in _PLAIN | _SCALES and target in _PLAIN):
        return True
    return source in _WHOLE and target in _WHOLE


class LostScale(InvalidError):
    """A copy between quantized and plain dtypes."""


def check_conversion(source: torch.Tensor, target: torch.Tensor) -> None:
    """Raises LostScale for a copy that would lose the meaning of its numbers."""
    if not converts(source.dtype, target.dtype):
        raise LostScale(f"a copy from {short_name(source.dtype)} to {short_name(target.dtype)} "
                        "would lose the scale of quantized weights")


@dataclass
class Fit:
    """A version, and a model that it is to fill."""

    model: torch.nn.Module
    new: Contents
    allow_unwritten: tuple[str, ...] = ()
    allow_unread: tuple[str, ...] = ()
    # True: the model serves, so its weights must stay if the version does not fit.
    serving: bool = False
    # The contents of the version that the model has now, if known.
    before: Contents | None = None
    # The advice to the user for a tensor that the loader does not read.
    pass_over: str = "name it in allow_unread"

    def check_quantization(self) -> None:
        """Raises InvalidError when the version is quantized in another way than the one before."""
        new, before = self.new, self.before
        if before is None or None in (new.quantization, before.quantization):
            return
        if new.quantization != before.quantization:
            raise self._refusal(
                f"the quantization in its configuration is {new.quantization}, and the model was "
                f"made for that of {before}, {before.quantization}",
                "publish it quantized in the same way, or start an engine with its configuration")

    def check(self, plan: Plan | None, failed: Mapping[str, str]) -> None:
        """Checks the version before anything is written. InvalidError names the tensor and the
        version.

        `plan`: of a recording with the version's tensors; None: there is none. `failed`: the
        tensors at which the loader raised, with the errors."""
        self.check_quantization()
        if plan is None:
            self._check_unchanged("the model's loader does more than a recording can follow")
            return
        self.check_conversions(plan)
        self._check_followed(plan, failed)
        self.check_unread(entry.name for entry in plan.entries)
        lacking = "" if plan.opaque else unwritten(self.model, plan, None, self.allow_unwritten)
        if lacking:
            raise self._refusal(
                f"not every parameter has weights: {lacking}{self._missing()}",
                "publish what is missing, or name what needs none in allow_unwritten")

    def misfit(self, why: BaseException, name: str | None, meta: TensorMeta | None) -> InvalidError:
        """Returns the error for a loader that raised `why` after it took the tensor `name`."""
        if name is None or meta is None:
            return InvalidError(f"{self.new}: the model's loader failed before it took a tensor: "
                                f"{type(why).__name__}: {why}")
        into = _parameter_in(why.__traceback__, self.model)
        where = f", which it was putting into {into}" if into else ""
        return InvalidError(
            f"{self.new}: the model's loader failed at {name}, {_described(meta)}{where}: "
            f"{type(why).__name__}: {why}; publish {name} as the model's configuration says, or "
            "start the engine with the configuration of this version")

    def failed(self, why: BaseException) -> InvalidError:
        """Returns the error for a loader that raised `why` and does not tell the tensor. It names
        the first tensor that differs from the model's of that name, or from the version before."""
        own = self.model.state_dict(keep_vars=True)
        said = next((f"{name} is {_described(meta)} in it and {list(own[name].shape)} in the model"
                     for name, meta in self.new.tensors.items()
                     if name in own and tuple(own[name].shape) != meta.shape), "")
        if not said and self.before is not None:
            said = next((f"{name} is {_described(now)} in it and {_described(was)} in {self.before}"
                         for name, was, now in _differences(self.before, self.new)), "")
        reason = f"its loader failed: {type(why).__name__}: {' '.join(str(why).split())}"
        return self._refusal(f"{said}, and {reason}" if said else reason,
                             "publish the tensors that the model's configuration says")

    def _refusal(self, why: str, do: str) -> InvalidError:
        kept = ""
        if self.serving:
            kept = f"; nothing was written, the model keeps {self.before or 'its weights'}"
        return InvalidError(f"{self.new} does not fit the model: {why}; {do}{kept}")

    def _check_unchanged(self, because: str) -> None:
        if self.before is None:
            return
        for name, was, now in _differences(self.before, self.new):
            raise self._refusal(
                f"{name} is {_described(now)} in it and {_described(was)} in {self.before}, and "
                f"{because}", "publish the same tensors, or start the engine again")

    def check_conversions(self, plan: Plan, tensors: Mapping[str, torch.Tensor] | None = None
                          ) -> None:
        """Raises InvalidError for a move between quantized and plain dtypes. `tensors`: the plan's
        targets; None: those of the model."""
        targets = named_targets(self.model) if tensors is None else tensors
        for move in plan.moves():
            source, target = getattr(torch, move.dtype), targets[move.parameter].dtype
            if not converts(source, target):
                raise self._refusal(
                    f"{move.name} is {move.dtype} in it, and the model has it as "
                    f"{short_name(target)}, in {move.parameter}: a copy would lose the scale of "
                    "quantized weights", f"publish it as {short_name(target)}, or start the engine "
                    "with the configuration of this version")

    def _check_followed(self, plan: Plan, failed: Mapping[str, str]) -> None:
        """For a model that serves, raises InvalidError unless the loader is known to take each
        opaque tensor. That is known of the tensors of the model's present version."""
        if not self.serving or not plan.opaque:
            return
        known = self.before.tensors if self.before is not None else {}
        for name in plan.opaque:
            meta = self.new.tensors[name]
            if known.get(name) == meta or (self.before is None and name not in failed):
                continue
            was = f", {_described(known.get(name))} in {self.before}" if self.before else ""
            why = (f"the model's loader failed at it: {failed[name]}" if name in failed else
                   "where the loader puts it cannot be followed")
            raise self._refusal(
                f"{name} is {_described(meta)} in it{was}, and {why}",
                "publish the tensors that the model was made for, or start the engine with the "
                "configuration of this version")
        for name in known:
            # A plan does not say which parameters need a tensor, so every tensor must be there.
            if name not in self.new.tensors:
                raise self._refusal(f"it has no {name}, which {self.before} had",
                                    "publish what is missing, or start the engine again")

    def check_unread(self, names: Iterable[str]) -> None:
        """Raises InvalidError for a tensor that is new in this version and not in `names`, the
        tensors that the loader reads. In a first load, the engine's loader decides which tensors it
        ignores."""
        if self.before is None or not self.serving:
            return
        read = set(names)
        allowed = [re.compile(pattern) for pattern in self.allow_unread]
        for name, meta in self.new.tensors.items():
            if name in read or name in self.before.tensors:
                continue
            if not any(pattern.search(name) for pattern in allowed):
                raise self._refusal(
                    f"the model's loader does not read {name}, {_described(meta)}, which "
                    f"{self.before} did not have",
                    f"publish it without that tensor, or {self.pass_over}")

    def _missing(self) -> str:
        lost = [name for name in (self.before.tensors if self.before is not None else ())
                if name not in self.new.tensors]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f", as it has no {lost[0]}{more}, which {self.before} had" if lost else ""


class Handed:
    """Tensors on their way to a loader. Notes the last one, and whether the loader took all."""

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._pairs = iter(pairs)
        self.last: str | None = None
        self.meta: TensorMeta | None = None
        self.finished = False
        # True: the tensors themselves could not be read.
        self.failed = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            try:
                name, tensor = next(self._pairs)
            except StopIteration:
                self.finished = True
                return
            except BaseException:
                self.failed = True
                raise
            self.last, self.meta = name, TensorMeta(tuple(tensor.shape), tensor.dtype)
            yield name, tensor
            del tensor

    def explained(self, why: Exception, fit: Fit) -> Exception:
        """Returns the error to raise for a loader that raised `why`. It names the last tensor if
        that may be the reason."""
        memory = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
        spoken = isinstance(why, Error) and not isinstance(why, LostScale)
        if self.failed or spoken or isinstance(why, memory) or not isinstance(
                why, _MAY_BE_MISFITS):
            return why
        return fit.misfit(why, self.last, self.meta)


def difference(before: Contents, new: Contents) -> str:
    """Returns the first difference for which a plan of one version is not valid for the other, as
    text; "" when there is none."""
    for name, was, now in _differences(before, new):
        return f"{name} is {_described(now)} in it and {_described(was)} in {before}"
    if None not in (before.quantization, new.quantization) and (
            before.quantization != new.quantization):
        return (f"the quantization in its configuration is {new.quantization}, and that of "
                f"{before} is {before.quantization}")
    return ""


def _differences(before: Contents, new: Contents) -> Iterator[
        tuple[str, TensorMeta | None, TensorMeta | None]]:
    for name in {**new.tensors, **before.tensors}:
        was, now = before.tensors.get(name), new.tensors.get(name)
        if was != now:
            yield name, was, now


def _described(meta: TensorMeta | None) -> str:
    return f"{short_name(meta.dtype)} {list(meta.shape)}" if meta is not None else "absent"


def _parameter_in(trace: TracebackType | None, model: torch.nn.Module) -> str:
    """Returns the parameter in the innermost function with one as a local variable; "": no
    function."""
    names = {id(value): name for name, value in named_targets(model).items()}
    found = ""
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if id(value) in names and isinstance(value, torch.Tensor):
                found = f"{names[id(value)]}, {short_name(value.dtype)} {list(value.shape)}"
        trace = trace.tb_next
    return found
