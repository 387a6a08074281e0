"""The load format `rekindle`: fetches the tensors, or parts of them, that this rank's model reads.

vLLM makes the model before and post-processes it afterwards, as for its own formats. So every
layout, quantization and backend works that works with safetensors files.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from .._engines.loading import (
    Held, Pairs, Place, again, fill, held, hold, is_about_weights, let_go, of_one_generation,
    one_version)
from .._engines.options import Options
from .._engines.reading import whole_tensors
from .._engines.resident import forget
from ..errors import InvalidError, NotFoundError
from . import resident, versions
from .layout import load_layout
from .placing import place_of, ranks_of, role_of

logger = logging.getLogger("rekindle")
LOAD_FORMAT = "rekindle"
# Parameters that a drafting head shares with the target, where its checkpoint lacks them.
_OF_TARGET = (r"(^|\.)(embed_tokens|lm_head|shared_head\.head)\.weight$",)


class RekindleModelLoader(BaseModelLoader):
    """Takes its options from `--model-loader-extra-config`: `rekindle._engines.options.Options`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = Options.parse(load_config.model_loader_extra_config)
        # Called with the model before its load.
        self._note: Callable[[torch.nn.Module], None] = lambda model: None

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Returns how many bytes of the device's memory this worker's model has before its load."""
        if not self.options.resident:
            return 0
        taken = resident.look(self._of, self.options, vllm_config, vllm_config.model_config).taken
        return taken.size_bytes if taken is not None else 0

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Takes over the resident copy of this worker; without one, makes, fills and post-processes
        the model as vLLM does, and keeps it for a successor."""
        _name_kernel_cache()

        def load(note: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
            self._note = note
            return super(RekindleModelLoader, self).load_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix)

        if not self.options.resident or role_of(model_config) != "target":
            return load(self._note)
        looked = resident.look(self._of, self.options, vllm_config, model_config)
        return resident.load_model(self, looked, vllm_config, model_config, prefix, load)

    def download_model(self, model_config: Any) -> None:
        """Does nothing: the agent of this host has the weights, or pulls them."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fills the model and waits until every rank of its instance has been filled.

        When it fails on one rank, all raise. InvalidError names parameters without a tensor. With
        "fallback": "default", vLLM's own loader takes over on all ranks when the weights are not
        available, unless the model quantizes during the load and has begun to."""
        role = role_of(model_config)
        ranks = ranks_of(role)
        self._note(model)
        online, begun = _loads_online(model), False

        def load(pairs: Pairs) -> Any:
            nonlocal begun
            begun = True
            return model.load_weights(pairs)

        try:
            options, place = ranks.together(lambda: self._of(model_config, role))
            place = of_one_generation(place, ranks)
            if online:
                # These parameters are created during loading, so nothing can be recorded.
                options = replace(options, record=False)
            options = one_version(options, ranks)
            fill(model, load, options, place, [type(model)], role, ranks)
        except Exception as why:
            if self.options.fallback != "default" or not is_about_weights(why):
                raise
            if any(ranks.gather(online and begun)):
                raise InvalidError(
                    f"{why}; vLLM's default loader cannot take over any more, as the model "
                    "quantizes while it loads: start it again") from why
            logger.warning("rekindle: %s; vLLM's default loader takes over, as was asked for", why)
            let_go(role)
            default = replace(self.load_config, load_format="auto", model_loader_extra_config={})
            DefaultModelLoader(default).load_weights(model, model_config)

    def get_all_weights(self, model_config: Any,
                        model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the newest version, for vLLM's `reload_weights()` without arguments. Checks
        before the reload that the version fits the model, but not afterwards that vLLM has read all
        of it. The version is held once its last tensor was taken."""
        role = role_of(model_config)
        ranks = ranks_of(role)
        options, place = ranks.together(lambda: self._of(model_config, role))
        options = one_version(options, ranks)
        now = held(role)
        place = of_one_generation(place, ranks, now)
        # Not in the generator, because vLLM begins its reload before it takes the first tensor.
        found = ranks.together(
            lambda: again(model, lambda pairs: model.load_weights(pairs), options, place, now,
                          load_layout(model)), lambda made: made.session.close())
        return _given(role, found)

    def _of(self, model_config: Any, role: str) -> tuple[Options, Place]:
        config = get_current_vllm_config()
        place = place_of(config.parallel_config, self.options, role)
        place = replace(place, key=_key(config, model_config))
        if role == "target":
            # Raises InvalidError if no name is given.
            self.options.name
            return self.options, place
        target = getattr(config.speculative_config, "target_model_config", None)
        same = target is not None and target.model == model_config.model
        options, now = self.options.of_draft(same), held("target")
        if getattr(config.speculative_config, "method", None) != "draft_model":
            options = replace(options, allow_unwritten=(*options.allow_unwritten, *_OF_TARGET))
        if now is not None and now.options.name == options.name:  # of the same checkpoint
            options = replace(options, version=now.options.version)
        elif now is None and options.name == self.options.name and options.fallback:
            raise NotFoundError("the target model's weights have not come through Rekindle")
        return options, place


def _given(role: str, found: Held) -> Iterator[tuple[str, torch.Tensor]]:
    # vLLM post-processes later, and does not say when that is done.
    forget(role)
    try:
        yield from whole_tensors(found.session, found.options.load_timeout)
        found.session.loaded()
    except BaseException:
        found.session.close()
        raise
    hold(role, found)


_DECIDE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
           "prefill_context_parallel_size", "decode_context_parallel_size",
           "enable_expert_parallel", "expert_placement_strategy", "enable_eplb", "eplb_config",
           "data_parallel_rank", "rank")


def _key(config: Any, model_config: Any) -> dict[str, Any]:
    """Returns what decides the slices: vLLM's hash of the graph's configuration, and more."""
    parallel = config.parallel_config
    return {"vllm": versions.check(), "config": config.compute_hash(),
            "model": model_config.hf_config.to_json_string(),
            "parallel": {name: str(getattr(parallel, name, None)) for name in _DECIDE},
            "quantization": str(model_config.quantization), "dtype": str(model_config.dtype),
            "role": getattr(model_config, "runner_type", None)}


def _loads_online(model: torch.nn.Module) -> bool:
    """Whether vLLM quantizes the model during the load."""
    return any(getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
               for module in model.modules())


def _name_kernel_cache() -> None:
    """Has Triton keep its kernels below the caches of vLLM, unless TRITON_CACHE_DIR is set.

    torch.compile sets that variable only where it compiles the model. A worker that finds the
    model compiled would look for the kernels of its predecessor elsewhere, and compile them again."""
    from vllm import envs
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(envs.VLLM_CACHE_ROOT, "triton"))


def register_loader() -> None:
    from vllm.model_executor import model_loader
    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if known.get(LOAD_FORMAT) is not RekindleModelLoader:
        register_model_loader(LOAD_FORMAT)(RekindleModelLoader)
