"""SGLang's default loader with weights from Rekindle in place of files.

SGLang's own steps before and after stay the same. The recording is of `load_weights_only`, with the
names that some quantizations change. Post-processing follows.
"""
from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
from sglang.srt.runtime_context import get_model

from .._engines.loading import (
    ALONE, attached, every_held, held, is_about_weights, let_go)
from .._engines.options import Options
from .._engines.reading import whole_tensors
from .._engines.resident import note, note_nothing, seal_again
from ..boxes import Box
from ..cataloging import catalog
from ..errors import InvalidError
from . import filling, recovery, resident
from .ranks import check_backup

logger = logging.getLogger("rekindle")


@dataclass(frozen=True)
class _Weights:
    """Stands for weights between SGLang's two calls of the loader: of a first load, or of an update
    to `options`. `back`: the model returns to its version before the update."""

    model_config: Any
    options: Options | None = None
    back: bool = False


class RekindleModelLoader(DefaultModelLoader):
    """Takes its options from `--model-loader-extra-config`: `rekindle._engines.options.Options`."""

    def __init__(self, load_config: Any) -> None:
        # The default loader's constructor refuses our options.
        BaseModelLoader.__init__(self, load_config)
        # For an update, SGLang makes a loader without options. It takes those of the server.
        given = load_config.model_loader_extra_config or get_model().model_loader_extra_config
        self.options = Options.parse(_parsed(given))
        self._resident: resident.Start | None = None
        # The newest version, after the first request for it.
        self._newest: Options | None = None
        # Maps each role to the options before an update, for going back.
        self._before: dict[str, Options] = {}

    def download_model(self, model_config: Any) -> None:
        """Does nothing: the agent of this host has the weights, or pulls them."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        check_backup()
        if getattr(model_config, "modelopt_quant", None):
            raise InvalidError("ModelOpt makes its model from files: load format rekindle cannot")

        def load(start: resident.Start | None) -> torch.nn.Module:
            self._resident = start
            try:
                return super(RekindleModelLoader, self).load_model(
                    model_config=model_config, device_config=device_config)
            finally:
                self._resident = None

        if not self.options.resident or getattr(model_config, "is_draft_model", False):
            return load(None)
        return resident.load_model(self, self.options, model_config, device_config, load)

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Any:
        return _Weights(model_config)

    def _get_weights_iterator(self, source: Any, **_: Any) -> Any:
        """Returns the newest version for `update_weights_from_disk`. When that fails, SGLang asks
        again, to go back, and gets the version before. A recovery gets pairs."""
        asked = recovery.current()
        if asked is not None:
            return asked.giving(self._of_held(source, asked))
        if self._newest is not None:
            return _Weights(source.model_config, self._newest, back=True)
        part, options = filling.options_of(source.model_config, self.options)
        self._newest = filling.newest(part, options)
        self._before = {role: now.options for role, now in every_held().items()}
        return _Weights(source.model_config, self._newest)

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any,
                                     target_device: torch.device) -> None:
        if not isinstance(weights, _Weights):
            DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
            return

        def load(pairs: Any) -> None:
            DefaultModelLoader.load_weights_only(model, pairs, target_device)

        if self._resident is not None and self._resident.begins(model):
            return
        if weights.options is None:
            self._start(model, weights.model_config, load, target_device)
            DefaultModelLoader.postprocess_weights(model, target_device)
        else:
            self._update(model, weights, load, target_device)

    def _update(self, model: torch.nn.Module, weights: "_Weights", load: Any,
                target_device: torch.device) -> None:
        part = filling.part_of(model)
        assert weights.options is not None
        options = (self._back(model, weights.options) if weights.back
                   else filling.as_others(weights.options, part))
        if part.is_target:
            note("target")
        try:
            filling.update(model, options, load)
        except Exception:
            if part.is_target:
                note_nothing("target")
            raise
        DefaultModelLoader.postprocess_weights(model, target_device)
        if part.is_target:
            seal_again("target")

    def _start(self, model: torch.nn.Module, model_config: Any, load: Any,
               target_device: torch.device) -> None:
        part, options = filling.options_of(
            model_config, self.options, self.load_config.draft_model_idx)
        try:
            filling.start(model, part, options, load)
        except Exception as why:
            if options.fallback != "default" or not is_about_weights(why):
                raise
            logger.warning("rekindle: %s; SGLang's own loader takes over, as was asked for", why)
            let_go(part.role)
            DefaultModelLoader.load_weights_only(
                model, self._files()._get_all_weights(model_config, model), target_device)

    def _files(self) -> Any:
        """SGLang's own loader."""
        return DefaultModelLoader(of_files(self.load_config))

    def _back(self, model: torch.nn.Module, newest: Options) -> Options:
        """Returns the options of a model before the update; without any, those of the update."""
        before = self._before.get(filling.part_of(model).role, newest)
        logger.warning("rekindle: going back to %s@%s", before.name, before.version)
        return before

    def _of_held(self, source: Any,
                 asked: recovery.Recovery) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole tensors of the held version that a recovery wants; from files if the
        model came from there."""
        now = held("target")
        if now is None and self.options.fallback == "default":
            yield from self._files()._get_weights_iterator(source)
            return
        if now is None:
            raise InvalidError("the model's weights have not come through Rekindle: nothing says "
                               "which version it has")
        options = now.options
        found = catalog(options.name, options.version, fallback_dir=options.fallback_dir,
                        agent=options.agent, timeout=options.attach_timeout)
        boxes = [Box(info.name) for info in found.tensors if asked.wanted(info.name)]
        if not boxes:
            raise InvalidError(f"{options.name}@{options.version} has none of the tensors that "
                               "SGLang asks for in place of those of ranks that are gone")
        with attached(options, ALONE, now.device, boxes) as session:
            yield from whole_tensors(session, options.load_timeout)


def of_files(load_config: Any) -> Any:
    """Returns the configuration for SGLang's own loader."""
    return replace(load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={})


def _parsed(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) and given else given
