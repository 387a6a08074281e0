"""The weight transfer backend `rekindle`: `--weight-transfer-config '{"backend": "rekindle"}'`.

Trainers use vLLM's own control plane (`/start_weight_update`, `/update_weights`, …). The update
names the version, and workers attach to it. vLLM 0.23 runs the layerwise reload itself; later ones
leave it to the backend.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from .._engines.loading import held
from .._engines.options import Options
from .._engines.resident import forget, note, seal_again
from ..errors import InvalidError
from .reloading import abandon
from .updating import bring

logger = logging.getLogger("rekindle")
BACKEND = "rekindle"


@dataclass
class RekindleInitInfo(WeightTransferInitInfo):
    """`options`: as in `--model-loader-extra-config` of the load format; None: those of the
    model."""

    options: dict[str, Any] | None = None


@dataclass
class RekindleUpdateInfo(WeightTransferUpdateInfo):
    """The version to load: of the model in the options, or of another one (a draft)."""

    version: str | int = "latest"
    model: str | None = None


class RekindleTransferEngine(WeightTransferEngine[RekindleInitInfo, RekindleUpdateInfo]):
    """Each update loads one whole version, in one call of `update_weights`."""

    init_info_cls = RekindleInitInfo
    update_info_cls = RekindleUpdateInfo

    def __init__(self, config: Any, about: Any, *more: Any, **named: Any) -> None:
        super().__init__(config, about, *more, **named)
        self._options: Options | None = None
        self._updated = False

    def init_transfer_engine(self, init_info: RekindleInitInfo) -> None:
        if init_info.options is not None:
            self._options = Options.parse(init_info.options)

    @property
    def _is_target(self) -> bool:
        return self.model is getattr(self, "_default_model", self.model)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        if self._is_target:
            note("target")
        initialize_layerwise_reload(self.model)
        self._updated = False

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        finalize_layerwise_reload(self.model, self.model_config)
        if self._updated and self._is_target:
            seal_again("target")
        if not self._updated:
            # An error here would leave vLLM inside the update.
            logger.warning("rekindle: the weight update ends and no version was loaded")

    def receive_weights(self, update_info: RekindleUpdateInfo,
                        load_weights: Callable[[Any], Any] | None = None) -> None:
        """Loads the version. `load_weights`: the model's, from vLLM 0.23 in an update of checkpoint
        tensors.

        Raises what `attach` raises, and InvalidError naming parameters without weights."""
        model: torch.nn.Module = self.model
        role = "target" if self._is_target else "draft"
        if load_weights is not None:
            # The reload of vLLM 0.23 has begun, and its end is not known here.
            forget(role)
        now = held(role)
        options = self._options or (now.options if now is not None else Options())
        options = replace(options, model=update_info.model or options.model,
                          version=update_info.version)
        try:
            if load_weights is not None and getattr(load_weights, "__self__", None) is None:
                raise InvalidError("Rekindle has checkpoint tensors, and this update was started "
                                   "for tensors in vLLM's own format: start it with "
                                   "is_checkpoint_format=true")
            # The lambda looks load_weights up when it is called, because `reload` replaces it.
            bring(self.parallel_config, model, options, lambda pairs: model.load_weights(pairs),
                  role)
        except BaseException:
            # The update ends here, without a call of finish_weight_update.
            abandon(model)
            raise
        self._updated = True

    def shutdown(self) -> None:
        """Does nothing: the engine holds nothing between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Required by vLLM up to 0.26. A trainer publishes instead, without an engine."""
        raise InvalidError("publish with rekindle.publish(), then POST /update_weights with its "
                           "version")


def register_transfer() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RekindleTransferEngine)
