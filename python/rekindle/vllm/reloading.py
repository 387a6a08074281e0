"""Checks vLLM's layerwise reload. vLLM takes a layer that got nothing, or a part of its weights,
for loaded. It counts what a failed load has left in a layer as a part of the next load."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from inspect import BoundArguments
from typing import Any

import torch

from .._engines.completeness import amount, described, has_default, written
from .._engines.coverage import covered
from .._engines.fitting import Contents, Fit, Handed
from .._engines.loading import Pairs
from .._engines.options import Options
from .._engines.reading import whole_tensors
from ..errors import InvalidError
from ..recording.recorder import record
from ..recording.tracer import TensorMeta
from ..session import Session


def reload(model: torch.nn.Module, options: Options, session: Session,
           apply: Callable[[Pairs], Any], contents: Contents | None = None) -> None:
    """Reloads a model. `apply` gives tensors to the model's `load_weights`, in a reload of vLLM
    that it begins or that has begun. Then checks that all tensors were taken and all parameters
    written.

    InvalidError names what was not: the model then has weights of two versions."""
    pairs = Handed(whole_tensors(session, options.load_timeout))
    fit = Fit(model, contents or Contents(session.model, session.version, {}))
    with _Loads(model) as loads:
        try:
            apply(pairs)
        except Exception as why:
            explained = pairs.explained(why, fit)
            if explained is why:
                raise
            raise explained from why
    if not loads.ran:
        raise InvalidError("vLLM has not called the model's load_weights: nothing was loaded")
    if not pairs.finished:
        raise InvalidError(f"the model's loader has stopped after {pairs.last or 'nothing'}: the "
                           "model must not serve")
    lacking = described(loads.lacking, options.allow_unwritten)
    if lacking:
        raise InvalidError(f"{session.model}@{session.version} has not all weights of {lacking}: "
                           "the model must not serve")
    session.loaded()


def abandon(model: torch.nn.Module) -> None:
    """Cleans up after a reload that failed. Incomplete layers are restored, and the next reload
    counts nothing of this one."""
    from vllm.model_executor.model_loader.reload import layerwise
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()


class _Loads:
    """Checks the model before and after its `load_weights`, within vLLM's reload."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.ran = False
        # Maps a parameter to the part of it that was written.
        self.lacking: dict[str, str] = {}

    def __enter__(self) -> "_Loads":
        inner = self._model.load_weights

        def load_weights(pairs: Pairs, *more: Any, **named: Any) -> Any:
            _check_begun(self._model)
            returned = inner(pairs, *more, **named)
            self.ran = True
            self.lacking = _lacking(self._model)
            return returned

        self._model.load_weights = load_weights
        return self

    def __exit__(self, *_: Any) -> None:
        del self._model.load_weights


def _loadable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, dict[str, Any]]]:
    """Yields layers with parameters for which a checkpoint must have weights."""
    for name, layer in model.named_modules():
        own = {key: parameter for key, parameter in layer._parameters.items()
               if parameter is not None and parameter.numel() and not has_default(key)}
        if own:
            yield name, layer, own


def _check_begun(model: torch.nn.Module) -> None:
    """Raises InvalidError for a layer that is complete, or that vLLM does not reload: vLLM ignores
    weights for these."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    for name, layer, _ in _loadable(model):
        info = get_layerwise_info(layer)
        if not info.can_load() or info.load_numel:
            raise InvalidError(f"vLLM does not wait for weights of {name or type(model).__name__}: "
                               "begin an update for each version, and finish it")


def _lacking(model: torch.nn.Module) -> dict[str, str]:
    """Returns parameters that are not written in full. vLLM leaves a layer that got nothing as it
    was, with a warning. It leaves the unwritten part of a parameter as its memory was."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    # Maps a name to the written amount, and the id of the parameter that vLLM will restore.
    short: dict[str, tuple[str, int]] = {}
    filled: set[int] = set()
    for name, layer, own in _loadable(model):
        info = get_layerwise_info(layer)
        if not info.can_load():  # every element has come
            filled.update(map(id, own.values()))
            continue
        counts = _written(own, info.loaded_weights) if info.load_numel else {}
        kept: dict[str, Any] = (getattr(info, "kernel_tensors", None) or ({}, {}))[0]
        for key, parameter in own.items():
            count, kernel = counts.get(key, 0), id(kept.get(key, parameter))
            if count < parameter.numel():
                short[f"{name}.{key}" if name else key] = amount(count, parameter.numel()), kernel
            else:
                filled.add(kernel)
    # Tied parameters share memory, and only one of them gets the weights.
    return {name: how for name, (how, kernel) in short.items() if kernel not in filled}


def _written(own: dict[str, torch.Tensor], loads: list[tuple[str, Any]]) -> dict[str, int]:
    """Returns how many elements of each of a layer's parameters the loads that vLLM has deferred
    write, with the padding that they fill."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    given = {str(index): next(key for key, value in bound.arguments.items()
                              if key != "param" and isinstance(value, torch.Tensor))
             for index, (_, bound) in enumerate(loads)}
    tensors = {index: loads[int(index)][1].arguments[key] for index, key in given.items()}

    def load(pairs: Pairs) -> None:
        for index, tensor in pairs:
            name, bound = loads[int(index)]
            again = BoundArguments(bound.signature, OrderedDict(bound.arguments))
            again.arguments[given[index]] = tensor
            _get_original_loader(own[name])(*again.args, **again.kwargs)

    plan = record(load, {index: TensorMeta(tuple(tensor.shape), tensor.dtype)
                         for index, tensor in tensors.items()}, own)
    counts = {name: covered(own[name].shape, own[name].stride(), regions)
              for name, regions in written(plan).items()}
    for index in plan.opaque:
        # The destination of an opaque tensor is unknown, so it is not checked.
        counts[loads[int(index)][0]] = own[loads[int(index)][0]].numel()
    return counts
