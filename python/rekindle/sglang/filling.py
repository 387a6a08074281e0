"""A version into a model of SGLang's by the model's own loader: at the start, and later."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.runtime_context import get_model

from .._engines.loading import ALONE, Load, Pairs, fill, held, one_version
from .._engines.options import Options
from .._engines.writes import WriteWatch
from ..errors import Error, of_name
from .ranks import check_update, place_of, ranks_of

_roles: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def role_of(model: torch.nn.Module) -> str:
    """"target" or "draft". SGLang gives an update to its target first."""
    return _roles.get(model) or ("draft" if "target" in _roles.values() else "target")


def options_of(model_config: Any, options: Options) -> tuple[str, Options]:
    """The role of the model that this is the configuration of, and what it is to load."""
    if not getattr(model_config, "is_draft_model", False):
        return "target", options
    return "draft", as_draft(options, get_model().model_path == model_config.model_path)


def as_draft(options: Options, same_checkpoint: bool) -> Options:
    """Of the target's checkpoint it takes the version that the target has."""
    options, now = options.of_draft(same_checkpoint), held("target")
    if now is not None and now.options.name == options.name:
        options = replace(options, version=now.options.version)
    return options


def newest(role: str, options: Options) -> Options:
    """For an update: of the model that is held, else of `options`. All ranks call it.

    Raises, on all, when there is no such version."""
    check_update()
    now = held(role)
    if now is not None:
        options = replace(now.options, version="latest")
    if role == "draft":
        return as_draft(options, True) if now is not None else options
    return one_version(replace(options, version="latest"), ranks_of(role))


def start(model: torch.nn.Module, role: str, options: Options, load: Load) -> None:
    """The first load of a model, on all ranks or, with an error on each, on none.

    InvalidError names parameters that are not written."""
    _roles[model] = role
    ranks = ranks_of(role)
    place = place_of(options, ranks) if role == "target" else ALONE
    fill(model, _watched(model, load), one_version(options, ranks), place, None, role, ranks)


def update(model: torch.nn.Module, options: Options, load: Load) -> None:
    """A version into a model that serves, on all ranks or, with an error on each, on none. The
    session of before is let go of when the new one is held.

    What it raises says that the model may have weights of two versions, and must not serve."""
    check_update()
    role = role_of(model)
    _roles[model] = role
    ranks, now = ranks_of(role), held(role)
    place = place_of(options, ranks, now) if role == "target" else ALONE
    options = one_version(options, ranks)
    try:
        fill(model, _watched(model, load), options, place, None, role, ranks)
    except Exception as why:
        text = f"the update to {options.name}@{options.version} has failed: {why}"
        if now is not None:
            now.torn = text
        code = why.name if isinstance(why, Error) else "INTERNAL"
        raise of_name(code, f"{text}; the model may have weights of two versions, and must not "
                            "serve before an update has succeeded") from why


def _watched(model: torch.nn.Module, load: Load) -> Callable[[Pairs], dict[str, int]]:
    """SGLang's loaders do not say what they have loaded: it is seen to."""
    def watched(pairs: Pairs) -> dict[str, int]:
        with WriteWatch(model) as watch:
            load(pairs)
        return watch.elements()
    return watched
