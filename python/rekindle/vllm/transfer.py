"""The weight transfer backend `rekindle`: `--weight-transfer-config '{"backend": "rekindle"}'`.

Trainers use vLLM's own control plane (`/start_weight_update`, `/update_weights`, …); the update
says which version, and workers attach to it. vLLM 0.23 runs the layerwise reload itself and hands over
its `load_weights`; later ones leave both to the backend.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from .._engines.loading import ALONE, attached, device_of
from .._engines.options import Options
from .._engines.reading import whole_tensors
from ..errors import InvalidError
from .updating import bring

BACKEND = "rekindle"


@dataclass
class RekindleInitInfo(WeightTransferInitInfo):
    """`options`: as in `--model-loader-extra-config` of the load format."""

    options: dict[str, Any] | None = None


@dataclass
class RekindleUpdateInfo(WeightTransferUpdateInfo):
    """What to load: a version of the model in the options, or of another one (a draft)."""

    version: str | int = "latest"
    model: str | None = None


class RekindleTransferEngine(WeightTransferEngine[RekindleInitInfo, RekindleUpdateInfo]):
    """One update is one version, whole, in one call of `update_weights`."""

    init_info_cls = RekindleInitInfo
    update_info_cls = RekindleUpdateInfo

    def __init__(self, config: Any, about: Any, *more: Any, **named: Any) -> None:
        super().__init__(config, about, *more, **named)
        self._options = Options()
        self._updated = False

    def init_transfer_engine(self, init_info: RekindleInitInfo) -> None:
        self._options = Options.parse(init_info.options)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        initialize_layerwise_reload(self.model)
        self._updated = False

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        finalize_layerwise_reload(self.model, self.model_config)
        if not self._updated:
            raise InvalidError("the weight update ends and no version was loaded")

    def receive_weights(self, update_info: RekindleUpdateInfo,
                        load_weights: Callable[[Any], Any] | None = None) -> None:
        """Raises what `attach` raises, and InvalidError naming layers without weights."""
        model: torch.nn.Module = self.model
        options = replace(self._options, model=update_info.model or self._options.model,
                          version=update_info.version)
        if load_weights is not None:
            with attached(options, ALONE, device_of(model, options)) as session:
                load_weights(whole_tensors(session, options.load_timeout))
                session.loaded()
        else:
            draft = model is not getattr(self, "_default_model", model)
            bring(self.vllm_config, model, options, model.load_weights,
                  "draft" if draft else "target")
        self._updated = True

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Versions to 0.26 ask for it. A trainer publishes, and needs no engine for that."""
        raise InvalidError("publish with rekindle.publish(), then POST /update_weights with its "
                           "version")


def register_transfer() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RekindleTransferEngine)
