"""Records transformers' own loader, which renames tensors, merges experts, splits and transposes.

The loader gets stand-ins as `state_dict`. The parameters that it leaves in the model are then
stand-ins, too, and tell of which elements of which tensors they are made.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import session as sessions
from .._engines.fitting import Fit
from ..errors import Error, NotFoundError
from ..recording import boxes, execute
from ..recording.plan import Plan
from ..recording.recorder import plan_of
from ..recording.targets import named_targets
from ..recording.tracer import Recorder, TensorMeta, Traced
from . import memory

if TYPE_CHECKING:
    from torch import nn

Catalog = Mapping[str, TensorMeta]


class Recorded(NamedTuple):
    """A model that transformers has built, with memory instead of stand-ins, and a plan to fill it.
    """
    model: Any
    plan: Plan
    targets: dict[str, torch.Tensor]
    # Parameters without a tensor. transformers has initialised them.
    missing: list[str]
    # Tensors that transformers reports as unexpected.
    unread: list[str]


def is_pretrained(model: nn.Module) -> bool:
    """Whether transformers' own loader can load this model."""
    pretrained = ("transformers.modeling_utils", "PreTrainedModel")
    return any((kind.__module__, kind.__name__) == pretrained for kind in type(model).__mro__)


def record(kind: Any, config: Any, catalog: Catalog, **arguments: Any) -> Recorded | None:
    """Runs `kind.from_pretrained` on stand-ins. Returns None when it does more to tensors than we
    follow, and needs real ones.
    """
    recorder = Recorder({}, torch.device("cpu"))
    state = {name: recorder.tensor(name, meta) for name, meta in catalog.items()}
    try:
        model, info = kind.from_pretrained(None, config=config, state_dict=state,
                                           output_loading_info=True, **arguments)
    except Exception:
        if recorder.opaque:
            # The loader asked for values. Its result then depends on placeholders and says nothing.
            return None
        raise
    if recorder.opaque or info.get("error_msgs"):
        return None
    for name, value in _once(model).items():
        recorder.adopt(name, value)
    targets = memory.replace(model, lambda value: isinstance(value, Traced), _empty)
    if recorder.opaque:
        return None
    missing = sorted(set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]})
    return Recorded(model, plan_of(recorder.events, set(), catalog), targets, missing,
                    sorted(info["unexpected_keys"]))


def _once(model: nn.Module) -> dict[str, Traced]:
    """Returns the stand-ins that are parameters or buffers now, each under its first name."""
    found: dict[int, tuple[str, Traced]] = {}
    for name, value in named_targets(model).items():
        if isinstance(value, Traced):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _empty(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def shard_of(plan: Plan, catalog: Catalog) -> Any:
    """Returns the boxes of the plan. None: it reads every tensor whole, and then asks for the same
    shard as other workers.
    """
    wanted = boxes(plan)
    whole = {box.tensor for box in wanted
             if not box.extent or box.extent == catalog[box.tensor].shape}
    return None if len(whole) == len(wanted) == len(catalog) else wanted


def attach(recorded: Recorded, name: str, version: int, catalog: Catalog,
           options: Mapping[str, Any], targets: Mapping[str, torch.Tensor],
           timeout: float | None) -> sessions.Session:
    """Returns a session that has filled the targets."""
    session = sessions.attach(name, version,
                              **{**options, "shard": shard_of(recorded.plan, catalog)})
    try:
        execute(recorded.plan, _never, targets, session, timeout=timeout)
    except BaseException:
        session.close()
        raise
    return session


def _never(tensors: Any) -> None:
    raise AssertionError("nothing is opaque here")


class Planned(NamedTuple):
    """What to attach with, and how to fill a model from the session."""
    options: dict[str, Any]  # of rekindle.attach
    fill: Callable[[sessions.Session], Any]


def plan(model: Any, name: str, version: int, fit: Fit, strict: bool, convert: bool,
         timeout: float | None, options: dict[str, Any]) -> Planned:
    """Plans to fill an existing model of transformers, by the plan of a twin."""
    kind, arguments = type(model), {"dtype": model.dtype, "device_map": "cpu"}
    catalog = fit.new.tensors
    try:
        twin = record(kind, model.config, catalog, **spelled(arguments))
    except Error:
        raise
    except Exception as why:
        raise fit.failed(why) from why
    if twin is None:
        return Planned({**options, "device": None}, lambda session: _fill_real(
            session, model, fit, strict, timeout, options.get("device")))
    if strict and twin.missing:
        raise NotFoundError(f"{name}@{version} has nothing for {memory.some(twin.missing)} of the "
                            "model; strict=False leaves them as they are")
    if not convert:
        fit.check_conversions(twin.plan, twin.targets)
    fit.check_unread(catalog.keys() - set(twin.unread))
    _take_buffers(model, twin.model, options.get("device"))
    memory.materialize(model, options.get("device"))
    own = named_targets(model)
    targets = {key: own[key] for key in twin.targets}
    options.setdefault("device", memory.common_device(targets.values()))
    return Planned({**options, "shard": shard_of(twin.plan, catalog)}, lambda session: execute(
        twin.plan, _never, targets, session, timeout=timeout))


def _take_buffers(model: nn.Module, twin: nn.Module, device: Any) -> None:
    """Takes values for buffers that are not saved from the twin, where the model has none."""
    values = dict(twin.named_buffers(remove_duplicate=False))
    names = {id(b): n for n, b in model.named_buffers(remove_duplicate=False)}
    saved = model.state_dict(keep_vars=True).keys()
    to = memory.torch_device(device)
    memory.replace(model, lambda b: b.is_meta and id(b) in names and names[id(b)] not in saved,
                   lambda b: values[names[id(b)]].to(to))


def _fill_real(session: sessions.Session, model: Any, fit: Fit, strict: bool,
               timeout: float | None, device: Any) -> None:
    state = {info.name: tensor.clone() for info, tensor in session.entries(timeout)}
    twin, info = type(model).from_pretrained(
        None, config=model.config, state_dict=state, output_loading_info=True,
        **spelled({"dtype": model.dtype}))
    missing = sorted(info["missing_keys"])
    if strict and missing:
        raise NotFoundError(f"{session.model}@{session.version} has nothing for "
                            f"{memory.some(missing)} of the model; strict=False leaves them as "
                            "they are")
    fit.check_unread(state.keys() - set(info["unexpected_keys"]))
    _take_buffers(model, twin, device)
    memory.materialize(model, device)
    model.load_state_dict(twin.state_dict())


def spelled(arguments: dict[str, Any]) -> dict[str, Any]:
    """Renames dtype to torch_dtype for transformers 4."""
    import transformers
    if int(transformers.__version__.split(".")[0]) >= 5:
        return arguments
    return {"torch_dtype" if key == "dtype" else key: value for key, value in arguments.items()}
