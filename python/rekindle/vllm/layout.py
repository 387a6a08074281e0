"""Gives a serving model of vLLM the layout that its loader found, for a recording.

After a load, vLLM post-processes: parameters get other layouts and dtypes. For its layerwise reload
it notes the old ones. Here a model gets parameters like these, without memory. Then it gets its own
back, to which nothing was written. This also works within a reload that has begun.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TORCHAO = "_do_torchao_reload"


@contextmanager
def load_layout(model: torch.nn.Module) -> Iterator[None]:
    """A context in which the model has that layout. Nobody else may use the model meanwhile."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
    kept = [_Kept(layer) for layer in model.modules()]
    torchao = getattr(model, _TORCHAO, None)
    try:
        if torchao is not None:
            setattr(model, _TORCHAO, False)
        stand_ins: dict[int, torch.Tensor] = {}
        for one in kept:
            info = get_layerwise_info(one.layer)
            own = one.members
            if info.can_load() and info.kernel_tensors is not None:
                own = {**info.kernel_tensors[0], **info.kernel_tensors[1]}
            restore_layer_on_meta(one.layer, info)
            _stand_in(one.layer, own, stand_ins)
        yield
    finally:
        for one in kept:
            one.put_back()
        if torchao is not None:
            setattr(model, _TORCHAO, torchao)


class _Kept:
    """The attributes, parameters and buffers of a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer
        self._attributes = dict(vars(layer))
        self._parameters, self._buffers = dict(layer._parameters), dict(layer._buffers)
        self._transient = set(layer._non_persistent_buffers_set)

    @property
    def members(self) -> dict[str, Any]:
        return {**self._parameters, **self._buffers}

    def put_back(self) -> None:
        vars(self.layer).update(self._attributes)
        for now, before in ((self.layer._parameters, self._parameters),
                            (self.layer._buffers, self._buffers)):
            now.clear()
            now.update(before)
        self.layer._non_persistent_buffers_set.clear()
        self.layer._non_persistent_buffers_set.update(self._transient)


def _stand_in(layer: torch.nn.Module, own: dict[str, Any],
              known: dict[int, torch.Tensor]) -> None:
    """Replaces vLLM's tensors on meta by copies, because vLLM keeps them. The copies have the
    loaders from before any reload. Tied tensors share one copy."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    for held in (layer._parameters, layer._buffers):
        for name, tensor in list(held.items()):
            if tensor is None or not tensor.is_meta:
                continue
            key = id(own.get(name, tensor))
            if key not in known or known[key].size() != tensor.size():
                copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype,
                                           device="meta")
                copy.__class__ = tensor.__class__
                copy.__dict__ = dict(tensor.__dict__)
                if hasattr(copy, "weight_loader"):
                    copy.weight_loader = _get_original_loader(copy)
                known[key] = copy
            held[name] = known[key]
