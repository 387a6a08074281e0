"""Loads a version into a running vLLM by its layerwise reload, for `WorkerExtension`."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .._engines.loading import (
    Held, Next, Pairs, Ready, Update, Wanted, begin, finish, held, newer_version,
    of_one_generation, one_version, wanted_again)
from .._engines.options import Options
from .._engines.resident import note, note_nothing, seal_again
from .._engines.staging import keep, take_staged
from .._staging import Staging
from ..errors import InvalidError, NotFoundError
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
                "torn": now.torn, "resident": session.resident}
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
        found = bring(config.parallel_config, worker.model_runner.get_model(), options,
                      _reloading(worker))
        seal_again("target")
    return _said(found.session, begun)


def stage(worker: Any, version: str | int, given: dict[str, Any] | None) -> dict[str, Any]:
    """Begins to take a version beside the one that serves."""
    from vllm.config import set_current_vllm_config
    versions.check()
    config = worker.vllm_config
    options = replace(_options(config, held("target"), given), version=version)
    with set_current_vllm_config(config):
        return keep("target", lambda: declare(
            config.parallel_config, worker.model_runner.get_model(), options, _reloading(worker),
            "target", options.staged))


def switch(worker: Any) -> dict[str, Any]:
    """Loads the version that `stage` has begun to take."""
    from vllm.config import set_current_vllm_config
    begun = time.perf_counter()
    following = take_staged("target")
    if following is None:
        raise NotFoundError("no version is staged: call rekindle_stage before the pause")
    with set_current_vllm_config(worker.vllm_config):
        found = complete(following, "target")
        seal_again("target")
    return {**_said(found.session, begun), "phases": following.staged.phases,
            "why_not": following.staged.reason}


def _reloading(worker: Any) -> Callable[[Pairs], Any]:
    return lambda pairs: worker.reload_weights(weights_iterator=pairs)


def _said(session: Session, begun: float) -> dict[str, Any]:
    return {"model": session.model, "version": session.version, "tensors": session.tensor_count,
            "bytes": session.bytes_total, "rung": session.rung,
            "seconds": time.perf_counter() - begun}


def bring(parallel: Any, model: torch.nn.Module, options: Options, apply: Callable[[Pairs], Any],
          role: str = "target") -> Held:
    """Loads a version into `model` by `apply`, which takes checkpoint tensors. Holds the session.

    All ranks that have a part of the model call it. When one fails, all raise. The model is
    unchanged before the first tensor may have been written; after that it counts as torn. A check
    before any write finds whether the version fits the model: InvalidError names what does not. A
    version that was staged before, and is asked for now, is there already."""
    options = one_version(options, ranks_of(role))
    following = take_staged(role, options)
    if following is None:
        following = declare(parallel, model, options, apply, role, Staging("off"))
    else:
        wanted = following.wanted
        following = replace(following, ready=Ready(
            wanted, lambda session: _apply(model, wanted, session, apply)))
    return complete(following, role)


def declare(parallel: Any, model: torch.nn.Module, options: Options,
            apply: Callable[[Pairs], Any], role: str, staging: Staging) -> Next:
    """The part of `bring` that does not touch the model."""
    ranks, now = ranks_of(role), held(role)
    options = one_version(options, ranks)
    place = ranks.together(lambda: place_of(parallel, options, role))
    place = of_one_generation(place, ranks, now)

    def prepare() -> Ready:
        wanted = wanted_again(model, lambda pairs: model.load_weights(pairs), options, place, now,
                              load_layout(model))
        return Ready(wanted, lambda session: _apply(model, wanted, session, apply))
    return begin(prepare, ranks, staging)


def complete(following: Next, role: str) -> Held:
    """The part of `bring` that writes."""
    now, update = held(role), Update(None)
    note(role)
    try:
        return finish(following, role, ranks_of(role), update)
    except BaseException as why:
        if now is not None and update.begun:
            now.torn = str(why) or type(why).__name__
        note_nothing(role)
        raise


def _apply(model: torch.nn.Module, wanted: Wanted, session: Session,
           apply: Callable[[Pairs], Any]) -> None:
    try:
        reload(model, wanted.options, session, apply, wanted.contents)
    except BaseException:
        abandon(model)
        raise
    if wanted.device is not None and torch.cuda.is_available():
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
