"""`"resident": true`: the model of a worker outlives it, as SGLang computes with it.

SGLang's loader makes, fills and post-processes a model in one call. In a successor the same call
makes the model without memory for weights, and then gets the tensors of the copy.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.runtime_context import get_context, get_parallel

from .._engines import resident
from .._engines.loading import Place, one_version
from .._engines.on_meta import OnMeta
from .._engines.options import Options
from ..errors import Error
from . import filling
from .ranks import joins, place_of, ranks_of

_ROLE = "target"
# Arguments of a server that decide no byte of its model, and differ from start to start.
_VOLATILE = ("port", "host", "nccl_port", "dist_init_addr", "random_seed", "api_key",
             "admin_api_key", "model_loader_extra_config", "load_format", "log_level",
             "log_level_http", "served_model_name")
# Packages whose versions decide the format of post-processed weights.
_KERNELS = ("sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python", "deep-gemm", "triton")


@dataclass
class Start:
    """The load of a model that is resident afterwards."""

    key: str
    taken: resident.Taken | None = None
    made: OnMeta | None = None
    before: resident.Before | None = None

    def begins(self, model: torch.nn.Module) -> bool:
        """Called with the model, once it is made. True: it has got its tensors."""
        if self.taken is None or self.made is None:
            self.before = resident.begin(model)
            return False
        resident.adopt(model, self.taken, self.made)
        return True


def load_model(loader: Any, options: Options, model_config: Any, device_config: Any,
               load: Callable[[Start | None], torch.nn.Module]) -> torch.nn.Module:
    """Returns the model of a worker, from its copy or by `load`. A loaded model is kept."""
    device = resident.device_of(options)
    why_not = _unsupported(device)
    if why_not is not None or device is None:
        resident.warn(options.name, str(why_not))
        return load(None)
    ranks = ranks_of(_ROLE)
    try:
        place = place_of(options, ranks)
        options = one_version(options, ranks)
        key = ranks.together(lambda: _key(model_config, device))
    except Error:
        # The load finds the same, and knows whether another loader takes over.
        return load(None)
    taken = resident.take_together(options, place, device, key, ranks)
    if taken is not None:
        model = _come_back(taken, options, place, device, torch.device(device_config.device), load)
        if model is not None:
            loader.preloaded_weights_bytes = taken.size_bytes
            return model
    start = Start(key)
    model = load(start)
    why = (resident.keep(model, start.before, _ROLE, key, ranks) if start.before is not None
           else "it was not made by this loader")
    if why is not None:
        resident.warn(options.name, why)
    resident.release_memory()
    return model


def _come_back(taken: resident.Taken, options: Options, place: Place, device: str,
               target: torch.device,
               load: Callable[[Start | None], torch.nn.Module]) -> torch.nn.Module | None:
    """Returns a model with the tensors of the copy. None: they do not fit, on one rank or more."""
    def make() -> torch.nn.Module:
        with resident.making(target) as made:
            return load(Start(taken.key, taken, made))

    model = resident.come_back(taken, options, place, device, _ROLE, ranks_of(_ROLE), make)
    if model is not None:
        filling.remember_target(model)
    return model


def _unsupported(device: str | None) -> str | None:
    if device is None:
        return 'it is in host memory: "device" names the device'
    arguments = _arguments()
    for name, why in (("enable_eplb", "expert load balancing moves experts while it serves"),
                      ("enable_memory_saver", "the memory saver frees the memory of weights"),
                      ("cpu_offload_gb", "a part of it is offloaded to host memory")):
        if arguments.get(name):
            return why
    return "this rank joins others that serve" if joins() else None


def _arguments() -> dict[str, Any]:
    found: dict[str, Any] = get_context().resolved_server_args_dict()
    return found


def _key(model_config: Any, device: str) -> str:
    """Returns a text that differs whenever post-processed weights may differ."""
    parallel = get_parallel()
    ranks = {name: str(getattr(parallel, name)) for name in dir(parallel)
             if name.endswith(("_size", "_rank")) and not name.startswith("_")
             and isinstance(getattr(parallel, name, None), int)}
    return resident.key_of(device, _KERNELS, {
        "ranks": ranks, "rank": ranks_of(_ROLE).rank,
        "arguments": {name: str(value) for name, value in _arguments().items()
                      if name not in _VOLATILE},
        "model": model_config.hf_config.to_json_string(),
        "quantization": str(getattr(model_config, "quantization", None)),
        "dtype": str(model_config.dtype),
        "environment": {name: value for name, value in os.environ.items()
                        if name.startswith(("SGLANG_", "SGL_"))}})
