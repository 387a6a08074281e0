"""SGLang's default loader with weights from Rekindle in place of files.

What SGLang does before and after stays its own: `load_weights_only`, with the names that some
quantizations change, is what is recorded, and post-processing follows.
"""
from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
from sglang.srt.runtime_context import get_model

from .._engines.loading import ALONE, attached, held, is_about_weights, let_go
from .._engines.options import Options
from .._engines.reading import whole_tensors
from ..errors import InvalidError
from . import filling

logger = logging.getLogger("rekindle")


class _Weights:
    """Stands for weights between SGLang's two calls of the loader: the first load's, or an update's
    to `options`. Where something else takes them, it gets them whole."""

    def __init__(self, loader: "RekindleModelLoader", model_config: Any,
                 options: Options | None = None) -> None:
        self.model_config, self.options = model_config, options
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._loader.whole(self.model_config)


class RekindleModelLoader(DefaultModelLoader):
    """Options as `rekindle._engines.options.Options`, from `--model-loader-extra-config`."""

    def __init__(self, load_config: Any) -> None:
        BaseModelLoader.__init__(self, load_config)  # the default one's refuses our options
        # For an update SGLang makes a loader without options: they are those of the server.
        given = load_config.model_loader_extra_config or get_model().model_loader_extra_config
        self.options = Options.parse(_parsed(given))
        self._before: dict[str, Options] = {}  # by role: what an update finds, to go back to

    def download_model(self, model_config: Any) -> None:
        """Nothing: the agent of this host has the weights, or pulls them."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        if getattr(model_config, "modelopt_quant", None):
            raise InvalidError("ModelOpt makes its model from files: load format rekindle cannot")
        return super().load_model(model_config=model_config, device_config=device_config)

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Any:
        return _Weights(self, model_config)

    def _get_weights_iterator(self, source: Any, **_: Any) -> Any:
        """Of `update_weights_from_disk`: the newest version. SGLang asks once more when that has
        failed, to go back: it gets the version of before."""
        role, options = filling.options_of(source.model_config, self.options)
        if role in self._before:
            logger.warning("rekindle: going back to %s@%s", self._before[role].name,
                           self._before[role].version)
            return _Weights(self, source.model_config, self._before[role])
        options = filling.newest(role, options)
        now = held(role)
        if now is not None:
            self._before[role] = now.options
        return _Weights(self, source.model_config, options)

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any,
                                     target_device: torch.device) -> None:
        if not isinstance(weights, _Weights):
            DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
            return

        def load(pairs: Any) -> None:
            DefaultModelLoader.load_weights_only(model, self._renamed(pairs), target_device)

        if weights.options is None:
            self._start(model, weights.model_config, load, target_device)
        else:
            filling.update(model, weights.options, load)
        DefaultModelLoader.postprocess_weights(model, target_device)

    def _start(self, model: torch.nn.Module, model_config: Any, load: Any,
               target_device: torch.device) -> None:
        role, options = filling.options_of(model_config, self.options)
        try:
            filling.start(model, role, options, load)
        except Exception as why:
            if options.fallback != "default" or not is_about_weights(why):
                raise
            logger.warning("rekindle: %s; SGLang's own loader takes over, as was asked for", why)
            let_go(role)
            files = DefaultModelLoader(replace(
                self.load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={}))
            DefaultModelLoader.load_weights_only(
                model, files._get_all_weights(model_config, model), target_device)

    def _renamed(self, pairs: Any) -> Any:
        """Of several layers for multi-token prediction, the one that this draft model is."""
        index = self.load_config.draft_model_idx
        return pairs if index is None else self._filter_mtp_weights(pairs, "", index)

    def whole(self, model_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the version that is held, else of the newest: for a part of a model that SGLang moves
        elsewhere (experts of a rank that is gone)."""
        role, options = filling.options_of(model_config, self.options)
        now = held(role)
        options = now.options if now is not None else options
        with attached(options, ALONE, options.device) as session:
            yield from self._renamed(whole_tensors(session, options.load_timeout))


def _parsed(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) and given else given
