"""verl's FSDP training engines, which give the checkpoint engine their shards.

    actor_rollout_ref.model.external_lib=rekindle.verl.training
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=rekindle

verl calls `get_per_tensor_param()` of the training engine, and passes its result to the checkpoint
engine. The classes of verl return a generator that gathers each tensor on every rank. Those below
return `ShardedWeights`. verl's registry of training engines has a vendor beside each device, and
takes the vendor `rekindle` if VERL_ENGINE_VENDOR says so. Where there is no engine of that vendor
(Megatron, critics), verl takes its own.
"""
from __future__ import annotations

import logging
from typing import Any

from verl.utils.model import convert_weight_keys
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from rekindle._engines.sharded_weights import ShardedWeights
from rekindle._parts import Part
from rekindle.torch import parts_of

from .sharded import fsdp_parts

logger = logging.getLogger("rekindle")


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"],
                         device=["cuda", "npu"], vendor="rekindle")
class ShardedFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine of FSDP1 and FSDP2. With LoRA adapters or quantization-aware training, verl
    computes the published tensors from gathered ones. Then this class gathers, too."""

    def get_per_tensor_param(self, **options: Any) -> Any:
        gather = super().get_per_tensor_param
        why = self._must_gather()
        if why:
            logger.warning("rekindle: verl gathers the weights on every rank: %s", why)
            return gather(**options)
        return ShardedWeights(self._parts, lambda: gather(**options)[0]), None

    def _must_gather(self) -> str | None:
        if hasattr(self._inner(), "peft_config"):
            return "the model has LoRA adapters"
        return "quantization-aware training is on" if self._qat_enabled else None

    def _inner(self) -> Any:
        return getattr(self.module, "_fsdp_wrapped_module", self.module)

    def _parts(self) -> list[Part]:
        own = {part.name: part.name for part in parts_of(self.module)}
        names = {name: checkpoint for checkpoint, name in
                 convert_weight_keys(own, self._inner()).items()}
        return fsdp_parts(self.module, names,
                          packed_experts=self.model_config.hf_config.model_type == "gpt_oss")
