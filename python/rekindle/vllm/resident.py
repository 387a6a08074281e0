"""`"resident": true`: the model of a worker outlives it, as vLLM computes with it.

A successor makes its model without memory for weights, takes over the tensors, and skips load and
post-processing. vLLM measures the device's memory before it loads, so a copy is taken over before
that.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .._engines import resident
from .._engines.loading import Place, of_one_generation, one_version
from .._engines.options import Options
from ..errors import Error, InvalidError
from .placing import ranks_of

_ROLE = "target"
# Packages whose versions decide the format of post-processed weights.
_KERNELS = ("flashinfer-python", "flash-attn", "deep-gemm", "triton", "compressed-tensors")

Of = Callable[[Any, str], tuple[Options, Place]]
Note = Callable[[torch.nn.Module], None]


class Looked(NamedTuple):
    """What this worker has found. `why_not`: the model is not kept either."""

    key: str = ""
    why_not: str | None = None
    options: Options | None = None
    place: Place | None = None
    device: str | None = None
    taken: resident.Taken | None = None


# Of this process' start. vLLM asks for the memory with one loader, and loads with another.
_looked: Looked | None = None


def look(of: Of, options: Options, config: Any, model_config: Any) -> Looked:
    """Takes this worker's resident copy over, on all ranks of its model or on none. Looks once for
    each load."""
    global _looked
    if _looked is None:
        _looked = _look(of, options, config, model_config)
        if _looked.why_not is not None:
            resident.warn(model_config.model, _looked.why_not)
    return _looked


def _look(of: Of, options: Options, config: Any, model_config: Any) -> Looked:
    device = resident.device_of(options)
    why_not = _unsupported(config, device)
    if why_not is not None or device is None:
        return Looked(why_not=why_not)
    ranks = ranks_of(_ROLE)
    try:
        options, place = ranks.together(lambda: of(model_config, _ROLE))
        place = of_one_generation(place, ranks)
        key = ranks.together(lambda: _key(place, device))
        options = one_version(options, ranks)
    except Error as why:
        # The load finds the same, and knows whether another loader takes over.
        return Looked(why_not=str(why))
    taken = resident.take_together(options, place, device, key, ranks)
    return Looked(key, None, options, place, device, taken)


def load_model(loader: Any, looked: Looked, config: Any, model_config: Any, prefix: str,
               load: Callable[[Note], torch.nn.Module]) -> torch.nn.Module:
    """Returns the model of a worker, from its copy or by `load`. A loaded model is kept."""
    global _looked
    _looked = None
    if looked.taken is not None:
        model = _come_back(loader, looked, config, model_config, prefix)
        if model is not None:
            return model
    found: list[resident.Before] = []
    model = load(lambda made: found.append(resident.begin(made)) if looked.key else None)
    if looked.key:
        why = resident.keep(model, found[0], _ROLE, looked.key, ranks_of(_ROLE),
                            _rebuilds(model))
        if why is not None:
            resident.warn(model_config.model, why)
        resident.release_memory()
    return model


def _come_back(loader: Any, looked: Looked, config: Any, model_config: Any,
               prefix: str) -> torch.nn.Module | None:
    """Returns a model with the tensors of the copy. None: they do not fit, on one rank or more."""
    taken, options, place = looked.taken, looked.options, looked.place
    assert taken is not None and options is not None and place is not None and looked.device
    registered = _Registered(config.compilation_config)
    model = resident.come_back(taken, options, place, looked.device, _ROLE, ranks_of(_ROLE),
                               lambda: _made(loader, taken, config, model_config, prefix))
    if model is None:
        registered.put_back()
        resident.release_memory()
    return model


def _made(loader: Any, taken: resident.Taken, config: Any, model_config: Any,
          prefix: str) -> torch.nn.Module:
    from vllm.model_executor.model_loader.base_loader import (
        initialize_model, process_weights_after_loading)
    from vllm.utils.torch_utils import set_default_torch_dtype
    target = torch.device(loader.load_config.device or config.device_config.device)
    make = getattr(loader, "create_model", initialize_model)
    with set_default_torch_dtype(model_config.dtype):
        with target, resident.making(target) as made:
            model: torch.nn.Module = make(vllm_config=config, model_config=model_config,
                                          prefix=prefix)
        processed = _pre_processed()

        def rebuild() -> None:
            assert processed is not None
            with processed():
                process_weights_after_loading(model, model_config, target)

        resident.adopt(model, taken, made, rebuild if processed is not None else None)
    return model.eval()


def _pre_processed() -> Any:
    """Returns vLLM's context in which post-processing makes only objects; None: vLLM has none."""
    from vllm.model_executor import utils
    return getattr(utils, "weights_already_processed", None)


def _rebuilds(model: torch.nn.Module) -> bool:
    if _pre_processed() is None:
        return False
    return all(getattr(method, "supports_pre_processed_weights", False)
               for method in (getattr(module, "quant_method", None) for module in model.modules())
               if method is not None)


class _Registered:
    """The layers that vLLM has registered, by name: a second model would have the same names."""

    def __init__(self, config: Any) -> None:
        self._kept = [(value, value.copy()) for value in vars(config).values()
                      if isinstance(value, (dict, list, set))]

    def put_back(self) -> None:
        for value, before in self._kept:
            value.clear()
            if isinstance(value, list):
                value.extend(before)
            else:
                value.update(before)


def _unsupported(config: Any, device: str | None) -> str | None:
    if device is None:
        return 'it is in host memory: "device" names the device'
    if config.parallel_config.enable_eplb:
        return "expert load balancing moves experts while the model serves"
    if getattr(config.model_config, "enable_sleep_mode", False):
        return "sleep mode frees the memory of weights"
    if getattr(config.cache_config, "cpu_offload_gb", 0):
        return "a part of it is offloaded to host memory"
    return None


def _key(place: Place, device: str) -> str:
    """Returns a text that differs whenever post-processed weights may differ: what decides the
    slices, and what decides their format."""
    from vllm import envs
    factors: dict[str, Any] = getattr(envs, "compile_factors", dict)()
    return resident.key_of(device, _KERNELS, {
        "place": dict(place.key),
        "environment": {name: str(value) for name, value in factors.items()}})


# --- memory

def count_memory() -> None:
    """Lets vLLM know of the memory that a resident copy has, where vLLM does not ask its loader."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    if hasattr(BaseModelLoader, "get_external_weight_memory") or hasattr(
            WorkerWrapperBase, "rekindle_counts"):
        return
    inner = WorkerWrapperBase.init_device

    def init_device(self: Any, *args: Any, **named: Any) -> Any:
        with _counted(self.worker.vllm_config):
            return inner(self, *args, **named)

    WorkerWrapperBase.init_device = init_device
    WorkerWrapperBase.rekindle_counts = True


@contextlib.contextmanager
def _counted(config: Any) -> Iterator[None]:
    """While a worker starts: memory of its resident copy counts as free, because the weights will
    take it."""
    from vllm.v1.worker import gpu_worker
    from .loader import LOAD_FORMAT, RekindleModelLoader
    inner = gpu_worker.request_memory
    loader = (RekindleModelLoader(config.load_config)
              if config.load_config.load_format == LOAD_FORMAT else None)
    if loader is None or not loader.options.resident:
        yield
        return

    def request_memory(snapshot: Any, *more: Any, **named: Any) -> Any:
        size = loader.get_external_weight_memory(config)
        # A copy that was refused has given its memory back.
        snapshot.measure()
        snapshot.free_memory += size
        snapshot.cuda_memory -= size
        snapshot.non_torch_memory -= size
        return inner(snapshot, *more, **named)

    gpu_worker.request_memory = request_memory
    try:
        yield
    finally:
        gpu_worker.request_memory = inner
