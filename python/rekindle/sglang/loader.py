"""SGLang's default loader with weights from Rekindle in place of files.

What SGLang does before and after stays its own: `load_weights_only`, with the names that some
quantizations change, is what is recorded, and post-processing follows.
"""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader

from .._engines.loading import (
    ALONE, Place, attached, fill, held, is_about_weights, one_version)
from .._engines.options import Options
from .._engines.reading import whole_tensors
from ..errors import InvalidError

logger = logging.getLogger("rekindle")


class _Recorded:
    """Stands for the weights of a first load, between SGLang's two calls of the loader."""

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config


class RekindleModelLoader(DefaultModelLoader):
    """Options as `rekindle._engines.options.Options`, from `--model-loader-extra-config`; an update
    of a running server, which has none, goes by those of the first load."""

    def __init__(self, load_config: Any) -> None:
        BaseModelLoader.__init__(self, load_config)  # the default one's refuses our options
        given, before = load_config.model_loader_extra_config, held("target")
        self.options = (Options.parse(given) if given or before is None
                        else replace(before.options, version="latest"))

    def download_model(self, model_config: Any) -> None:
        """Nothing: the agent of this host has the weights, or pulls them."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        if getattr(model_config, "modelopt_quant", None):
            raise InvalidError("ModelOpt makes its model from files: load format rekindle cannot")
        return super().load_model(model_config=model_config, device_config=device_config)

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Any:
        return _Recorded(model_config)

    def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Any,
                                     target_device: torch.device) -> None:
        if isinstance(weights, _Recorded):
            self._fill(model, weights.model_config, target_device)
            DefaultModelLoader.postprocess_weights(model, target_device)
        else:
            DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)

    def _fill(self, model: torch.nn.Module, model_config: Any, target_device: torch.device) -> None:
        role, options, place = _of(self.options, model_config)

        def load(pairs: Any) -> None:
            return DefaultModelLoader.load_weights_only(model, self._renamed(pairs), target_device)

        try:
            if role == "target":
                options = of_one_version(options)
            fill(model, load, options, place, None, role)
        except Exception as why:
            if options.fallback != "default" or not is_about_weights(why):
                raise
            logger.warning("rekindle: %s; SGLang's own loader takes over, as was asked for", why)
            files = DefaultModelLoader(replace(
                self.load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={}))
            load(files._get_all_weights(model_config, model))

    def _renamed(self, pairs: Any) -> Any:
        """Of several layers for multi-token prediction, the one that this draft model is."""
        index = self.load_config.draft_model_idx
        return pairs if index is None else self._filter_mtp_weights(pairs, "", index)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """For `update_weights_from_disk`: the newest version, whole."""
        options = of_one_version(self.options)
        with attached(options, ALONE, options.device) as session:
            pairs = whole_tensors(session, self.options.load_timeout)
            yield from ((source.prefix + name, tensor) for name, tensor in self._renamed(pairs))


def _of(options: Options, model_config: Any) -> tuple[str, Options, Place]:
    from sglang.srt.runtime_context import get_model
    place = place_of(options)
    if not getattr(model_config, "is_draft_model", False):
        return "target", options, place
    same = get_model().model_path == model_config.model_path
    return "draft", options.of_draft(same), ALONE


def of_one_version(options: Options) -> Options:
    """The same on all ranks that hold a part of the model each; all of them call it."""
    from sglang.srt.distributed import get_world_group
    group = get_world_group()
    if group.world_size == 1:
        return options
    return one_version(options, group.rank_in_group == 0,
                       lambda said: group.broadcast_object(said, src=0))


def place_of(options: Options) -> Place:
    """This worker's rank among those that serve together: tensor and pipeline parallel."""
    from sglang.srt.distributed import get_world_group
    group = get_world_group()
    instance = options.instance or os.environ.get("REKINDLE_INSTANCE")
    if instance is None:
        return ALONE
    generation = options.generation
    if generation is None:
        said = os.environ.get("REKINDLE_GENERATION")
        generation = int(said) if said else time.time_ns() // 1_000_000
        if group.world_size > 1:
            generation = int(group.broadcast_object(generation, src=0))
    return Place(instance, generation, group.rank_in_group, group.world_size)
