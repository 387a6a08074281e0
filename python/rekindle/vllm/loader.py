"""The load format `rekindle`: tensors, or the parts of them that this rank's model reads.

vLLM makes the model before and post-processes it afterwards, as for its own formats, so every
layout, quantization and backend works that works with safetensors files.
"""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .._engines.loading import (
    ALONE, Place, attached, device_of, fill, held, is_about_weights, one_version)
from .._engines.options import Options
from .._engines.reading import whole_tensors
from . import versions

logger = logging.getLogger("rekindle")
LOAD_FORMAT = "rekindle"


class RekindleModelLoader(BaseModelLoader):
    """Takes its options from `--model-loader-extra-config`: `rekindle._engines.options.Options`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = Options.parse(load_config.model_loader_extra_config)

    def download_model(self, model_config: Any) -> None:
        """Nothing: the agent of this host has the weights, or pulls them."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fills the model and waits until every rank of its instance has been filled.

        InvalidError names parameters that no tensor was for. With "fallback": "default" vLLM's own
        loader takes over when the weights cannot be had."""
        role, options, place = self._of(model_config)
        if _loads_online(model):
            options = replace(options, record=False)  # its parameters are made while they load
        try:
            if role == "target":
                options = of_one_version(options, get_current_vllm_config())
            fill(model, model.load_weights, options, place, [type(model)], role)
        except Exception as why:
            if options.fallback != "default" or not is_about_weights(why):
                raise
            logger.warning("rekindle: %s; vLLM's default loader takes over, as was asked for", why)
            default = replace(self.load_config, load_format="auto", model_loader_extra_config={})
            DefaultModelLoader(default).load_weights(model, model_config)

    def get_all_weights(self, model_config: Any,
                        model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The newest version, for vLLM's `reload_weights()` without arguments."""
        role, options, _ = self._of(model_config)
        if role == "target":
            options = of_one_version(options, get_current_vllm_config())
        with attached(options, ALONE, device_of(model, options)) as session:
            yield from whole_tensors(session, options.load_timeout)

    def _of(self, model_config: Any) -> tuple[str, Options, Place]:
        config = get_current_vllm_config()
        place = place_of(config, self.options)
        place = replace(place, key=_key(config, model_config))
        if getattr(model_config, "runner_type", None) != "draft":
            return "target", self.options, place
        target = getattr(config.speculative_config, "target_model_config", None)
        same = target is not None and target.model == model_config.model
        options, now = self.options.of_draft(same), held("target")
        if now is not None and now.options.name == options.name:  # of the same checkpoint
            options = replace(options, version=now.options.version)
        alone = f"{place.instance}.draft{place.rank}" if place.instance else ""
        return "draft", options, replace(place, instance=alone, rank=0, world=1)


def place_of(config: Any, options: Options) -> Place:
    """This worker's rank in its instance, of which each data parallel replica is one."""
    parallel = config.parallel_config
    world, rank = parallel.world_size, parallel.rank
    instance = options.instance or os.environ.get("REKINDLE_INSTANCE")
    if instance is None:
        return ALONE
    if parallel.data_parallel_size > 1:
        instance = f"{instance}.dp{parallel.data_parallel_index}"
    return Place(instance, _generation(options, world), rank, world)


def _generation(options: Options, world: int) -> int:
    """Same on all ranks of one start, and later than that of any start before."""
    if options.generation is not None:
        return options.generation
    said = os.environ.get("REKINDLE_GENERATION")
    if said:
        return int(said)
    return agreed(time.time_ns() // 1_000_000, world)


def agreed(value: int, world: int) -> int:
    """What the first rank says."""
    if world == 1:
        return value
    from vllm.distributed import get_world_group
    return int(get_world_group().broadcast_object(value, src=0))


def of_one_version(options: Options, config: Any) -> Options:
    """The same on all ranks that hold a part of the model each; all of them call it."""
    if config.parallel_config.world_size == 1:
        return options
    from vllm.distributed import get_world_group
    group = get_world_group()
    return one_version(options, group.rank_in_group == 0,
                       lambda said: group.broadcast_object(said, src=0))


_DECIDE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
           "prefill_context_parallel_size", "decode_context_parallel_size",
           "enable_expert_parallel", "expert_placement_strategy", "enable_eplb", "eplb_config",
           "data_parallel_rank", "rank")


def _key(config: Any, model_config: Any) -> dict[str, Any]:
    """What decides the slices, besides what vLLM counts among what decides the graph."""
    parallel = config.parallel_config
    return {"vllm": versions.check(), "config": config.compute_hash(),
            "model": model_config.hf_config.to_json_string(),
            "parallel": {name: str(getattr(parallel, name, None)) for name in _DECIDE},
            "quantization": str(model_config.quantization), "dtype": str(model_config.dtype),
            "role": getattr(model_config, "runner_type", None)}


def _loads_online(model: torch.nn.Module) -> bool:
    """Whether vLLM quantizes it while it loads."""
    return any(getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
               for module in model.modules())


def register_loader() -> None:
    from vllm.model_executor import model_loader
    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if known.get(LOAD_FORMAT) is not RekindleModelLoader:
        register_model_loader(LOAD_FORMAT)(RekindleModelLoader)
