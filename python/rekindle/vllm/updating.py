"""Loads a version into a running vLLM by its layerwise reload, for `WorkerExtension`."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .._engines.loading import (
    Held, Pairs, again, held, hold, newer_version, of_one_generation, one_version)
from .._engines.options import Options
from ..errors import InvalidError
from ..session import Session
from . import versions
from .layout import load_layout
from .placing import place_of, ranks_of
from .reloading import abandon, reload


def status() -> dict[str, Any]:
    """Returns the status of each model of this worker that came through Rekindle."""
    found = {}
    for role in ("target", "draft"):
        now = held(role)
        if now is not None:
            session = now.session
            found[role] = {
                "model": session.model, "version": session.version, "rung": session.rung,
                "device_path": session.device_path, "instance": now.place.instance or None,
                "generation": now.place.generation, "tensors": len(now.names),
                "recorded": now.boxes is not None, "bytes": session.bytes_total,
                "torn": now.torn}
    return found


def wait_for_update(timeout: float) -> int | None:
    """Returns `newer_version` of the target. InvalidError: it was not loaded through Rekindle."""
    now = held("target")
    if now is None:
        raise InvalidError("this worker's weights have not come through Rekindle: nothing says "
                           "which model to wait for")
    return newer_version(now, timeout)


def update(worker: Any, version: str | int, given: dict[str, Any] | None) -> dict[str, Any]:
    """Attaches, reloads and commits. Returns the version, its size and the time that it took."""
    from vllm.config import set_current_vllm_config
    begun = time.perf_counter()
    versions.check()
    config = worker.vllm_config
    options = replace(_options(config, held("target"), given), version=version)
    with set_current_vllm_config(config):
        session = bring(config.parallel_config, worker.model_runner.get_model(), options,
                        lambda pairs: worker.reload_weights(weights_iterator=pairs))
    return {"model": session.model, "version": session.version, "tensors": session.tensor_count,
            "bytes": session.bytes_total, "rung": session.rung,
            "seconds": time.perf_counter() - begun}


def bring(parallel: Any, model: torch.nn.Module, options: Options, apply: Callable[[Pairs], Any],
          role: str = "target") -> Session:
    """Loads a version into `model` by `apply`, which takes checkpoint tensors. Holds the session.

    All ranks that have a part of the model call it. When one fails, all raise. The model is
    unchanged before the first tensor may have been written; after that it counts as torn. A check
    before any write finds whether the version fits the model: InvalidError names what does not."""
    ranks, now = ranks_of(role), held(role)
    options = one_version(options, ranks)
    place = ranks.together(lambda: place_of(parallel, options, role))
    place = of_one_generation(place, ranks, now)
    found = ranks.together(
        lambda: again(model, lambda pairs: model.load_weights(pairs), options, place, now,
                      load_layout(model)), lambda made: made.session.close())
    try:
        ranks.together(lambda: _apply(model, found, apply))
        ranks.together(lambda: found.session.commit(options.commit_timeout))
    except BaseException as why:
        found.session.close()
        if now is not None:
            now.torn = str(why) or type(why).__name__
        raise
    hold(role, found)
    return found.session


def _apply(model: torch.nn.Module, found: Held, apply: Callable[[Pairs], Any]) -> None:
    try:
        reload(model, found.options, found.session, apply, found.contents)
    except BaseException:
        abandon(model)
        raise
    if found.device is not None and torch.cuda.is_available():
        # All copies must be complete before anyone learns that this rank may serve.
        torch.cuda.synchronize()


def _options(config: Any, now: Held | None, given: dict[str, Any] | None) -> Options:
    if given is not None:
        return Options.parse(given)
    if now is not None:
        return now.options
    if config.load_config.load_format == "rekindle":
        return Options.parse(config.load_config.model_loader_extra_config)
    return Options()
