"""Fills a model of SGLang with a version, by the model's own loader: at the start, and later."""
from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_model, get_spec

from .._engines.coverage import Region
from .._engines.loading import (
    ALONE, Load, Next, Pairs, Place, Update, declare, finish, held, one_version)
from .._engines.options import Options
from .._engines.ranks import ONE, Ranks
from .._engines.staging import keep, take_staged
from .._engines.writes import WriteWatch
from .._staging import Staging
from ..errors import Error, InternalError, InvalidError, of_name
from .ranks import check_update, joins, place_of, ranks_of
from .versions import KEEPING

logger = logging.getLogger("rekindle")

# Algorithms whose draft model shares weights with the target.
_SHARING = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
_EMBEDDINGS = r"(^|\.)(embed_tokens|word_embeddings)\.weight$"
_HEAD = r"(^|\.)(lm_head|shared_head\.head)\.weight$"


@dataclass(frozen=True)
class Part:
    """One of the models of this process. `role`: "target" or "draft". Several layers for
    multi-token prediction are a model each: "draft", "draft.1", …. `layer`: the number among
    these."""

    role: str
    layer: int | None = None

    @classmethod
    def draft(cls, layer: int | None = None) -> Part:
        return cls(f"draft.{layer}" if layer else "draft", layer)

    @property
    def is_target(self) -> bool:
        return self.role == "target"


TARGET = Part("target")
_parts: WeakKeyDictionary[torch.nn.Module, Part] = WeakKeyDictionary()


def remember_target(model: torch.nn.Module) -> None:
    """For a target that `start` has not filled."""
    _parts[model] = TARGET


def part_of(model: torch.nn.Module) -> Part:
    """Returns the part of a model that is to be updated. SGLang updates its target first.

    InvalidError: it is one of several draft layers, and nothing tells which."""
    known = _parts.get(model)
    if known is not None:
        return known
    if TARGET not in _parts.values():
        return TARGET
    _check_layers()
    return Part.draft()


def _check_layers() -> None:
    """Checks a draft that is not from Rekindle. InvalidError: it is one of several layers."""
    if get_spec().enable_multi_layer_eagle:
        raise InvalidError("nothing says which of several draft layers this model is, as it has "
                           "not come through Rekindle: start the server with "
                           "--load-format rekindle")


def options_of(model_config: Any, options: Options,
               layer: int | None = None) -> tuple[Part, Options]:
    """Returns the part of the model with this configuration, and the options for its load. `layer`:
    of one of several drafts, if known."""
    if not getattr(model_config, "is_draft_model", False):
        return TARGET, options
    part = Part.draft(layer)
    return part, as_draft(options, get_model().model_path == model_config.model_path, part)


def as_draft(options: Options, same_checkpoint: bool, part: Part) -> Options:
    """Returns the options of a draft. From the checkpoint of the target or of the first draft
    layer, it takes the version that this model has."""
    return as_others(options.of_draft(same_checkpoint), part)


def as_others(options: Options, part: Part) -> Options:
    """Returns the options with the version that an earlier model of this process has of the same
    checkpoint. A newer version may have been published since."""
    for before in ("target", "draft"):
        now = held(before)
        if before == part.role:
            break
        if now is not None and now.options.name == options.name:
            return replace(options, version=now.options.version)
    return options


def newest(part: Part, options: Options) -> Options:
    """Returns the options for an update: those of the held model, else `options`, with the newest
    version. All ranks call it.

    All raise when there is no such version."""
    check_update()
    if not part.is_target and all(known.is_target for known in _parts.values()):
        _check_layers()
    now = held(part.role)
    if part.is_target:
        options = replace(now.options if now is not None else options, version="latest")
    elif now is not None:
        options = as_draft(replace(now.options, version="latest"), True, part)
    return one_version(options, ranks_of(part.role))


def start(model: torch.nn.Module, part: Part, options: Options, load: Load) -> None:
    """Loads a model for the first time, on all ranks; or on none, with an error on each. A rank
    that joins others loads by itself.

    InvalidError names parameters that are not written."""
    _parts[model] = part
    alone = joins()
    if alone and options.version == "latest":
        raise InvalidError(f"this rank joins others that serve {options.name}: say which version "
                           'they have, as "version" (of a draft "draft_version") in the extra '
                           "configuration")
    ranks = ONE if alone else ranks_of(part.role)
    place = place_of(options, ranks) if part.is_target and not alone else ALONE
    options = one_version(options, ranks)
    finish(_declare(model, options, load, place, part, ranks, None, Staging("off")), part.role,
           ranks)


def update(model: torch.nn.Module, options: Options, load: Load) -> None:
    """Loads a version into a model that serves, on all ranks; or on none, with an error on each.
    The old session closes when the new one is held.

    InvalidError names what does not fit the model, before anything is written. A later error says
    that the model may have weights of two versions, and must not serve."""
    part, ranks, options = _part_to_update(model, options)
    now, begun = held(part.role), _update_of(part, options)
    try:
        following = take_staged(part.role, options)
        if following is None:
            following = _declare_update(model, options, load, part, ranks, begun, Staging("off"))
        finish(following, part.role, ranks, begun)
    except Exception as why:
        text = f"the update to {options.name}@{options.version} has failed: {why}"
        code = why.name if isinstance(why, Error) else "INTERNAL"
        if not begun.begun:
            raise of_name(code, text) from why
        if now is not None:
            now.torn = text
        raise of_name(code, f"{text}; the model may have weights of two versions, and must not "
                            "serve before an update has succeeded") from why


def stage(model: torch.nn.Module, options: Options, load: Load) -> None:
    """Checks that a version fits a model that serves, on all ranks, and begins to take it into
    memory beside the one that serves. An `update` to the same version then loads it from there.

    InvalidError names what does not fit; ExhaustedError: there is no room, and the options require
    it."""
    part, ranks, options = _part_to_update(model, options)
    state = keep(part.role, lambda: _declare_update(
        model, options, load, part, ranks, _update_of(part, options), options.staged))
    if state["why_not"] is not None:
        logger.warning("rekindle: %s@%s is not staged: %s", options.name, options.version,
                       state["why_not"])


def _part_to_update(model: torch.nn.Module, options: Options) -> tuple[Part, Ranks, Options]:
    check_update()
    part = part_of(model)
    _parts[model] = part
    ranks = ranks_of(part.role)
    options = one_version(options, ranks)
    _check_same(options, ranks)
    return part, ranks, options


def _update_of(part: Part, options: Options) -> Update:
    now = held(part.role)
    same = now is not None and now.options.name == options.name
    return Update(now.contents if now is not None and same else None)


def _declare_update(model: torch.nn.Module, options: Options, load: Load, part: Part, ranks: Ranks,
                    begun: Update, staging: Staging) -> Next:
    place = place_of(options, ranks, held(part.role)) if part.is_target else ALONE
    return _declare(model, options, load, place, part, ranks, begun, staging)


def _declare(model: torch.nn.Module, options: Options, load: Load, place: Place, part: Part,
             ranks: Ranks, begun: Update | None, staging: Staging) -> Next:
    if not part.is_target:
        of_target = _of_target(model)
        load = _without(of_target, load)
        allowed = dict.fromkeys((*options.allow_unwritten, *_shared(model), *of_target))
        options = replace(options, allow_unwritten=tuple(allowed))
    if part.layer is not None:
        load = _of_layer(part.layer, load)
    return declare(model, _watched(model, load), options, place, None, ranks, begun, staging)


def _shared(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns patterns of a draft's parameters that SGLang replaces by the target's after the load:
    many checkpoints lack them."""
    algorithm = str(get_spec().speculative_algorithm).upper()
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if algorithm not in _SHARING or not kinds.isdisjoint(KEEPING):
        return ()
    if algorithm != "EAGLE3" or getattr(model, "load_lm_head_from_target", False):
        return _EMBEDDINGS, _HEAD
    config = getattr(model, "config", None)
    size = getattr(config, "hidden_size", None)
    return (_EMBEDDINGS,) if getattr(config, "target_hidden_size", size) == size else ()


def _of_target(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns patterns of a draft's parameters that are the target's by now. A separate checkpoint
    of the draft may have others."""
    targets = [known for known, part in _parts.items() if part == TARGET]
    theirs = {id(parameter) for target in targets for parameter in target.parameters()}
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False)
             if id(parameter) in theirs]
    in_checkpoints = [pattern for pattern in (_EMBEDDINGS, _HEAD)
                      if any(re.search(pattern, name) for name in names)]
    return (*in_checkpoints, *(f"^{re.escape(name)}$" for name in names))


def _without(patterns: tuple[str, ...], load: Load) -> Load:
    return lambda pairs: load(pair for pair in pairs if not any(
        re.search(pattern, pair[0]) for pattern in patterns))


def _of_layer(layer: int, load: Load) -> Load:
    """Returns a loader for one of several layers. SGLang's models of them take tensors by the names
    of the first layer."""
    return lambda pairs: load(DefaultModelLoader._filter_mtp_weights(pairs, "", layer))


def _check_same(options: Options, ranks: Ranks) -> None:
    """Raises InternalError on all ranks when they are to load different versions: SGLang makes one
    go back after an error of its own, while others continue."""
    asked = ranks.gather(f"{options.name}@{options.version}")
    if len(set(asked)) > 1:
        raise InternalError(f"ranks are to load {', '.join(sorted(set(asked)))} at the same time: "
                            "start the server again")


def _watched(model: torch.nn.Module, load: Load) -> Callable[[Pairs], dict[str, set[Region]]]:
    """Returns a loader that reports what it has loaded. SGLang's loaders do not."""
    def watched(pairs: Pairs) -> dict[str, set[Region]]:
        with WriteWatch(model) as watch:
            load(pairs)
        return watch.regions()
    return watched
