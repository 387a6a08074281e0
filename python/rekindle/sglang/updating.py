"""Loads a version by name into a running SGLang, for `rekindle.sglang.load`."""
from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from .._engines.loading import Load, held
from .._engines.options import Options
from .._engines.resident import forget
from . import filling


def update_to(model: torch.nn.Module, name: str, version: str) -> None:
    """Loads a version into the target, or into a draft. A draft with another checkpoint than the
    target keeps the model that its options name."""
    # SGLang post-processes later, and does not say when that is done.
    forget("target")
    filling.update(model, _options(model, name, version), _load(model))


def stage_to(model: torch.nn.Module, name: str, version: str) -> None:
    """Begins to take a version for a later `update_to`."""
    filling.stage(model, _options(model, name, version), _load(model))


def _options(model: torch.nn.Module, name: str, version: str) -> Options:
    part = filling.part_of(model)
    now = held(part.role) or held("target")
    options = replace(now.options if now is not None else Options(), model=name, version=version)
    if not part.is_target and now is not None:
        options = filling.as_draft(options, now.options.draft_model is None, part)
    return options


def _load(model: torch.nn.Module) -> Load:
    device = next(model.parameters()).device
    return lambda pairs: DefaultModelLoader.load_weights_only(model, pairs, device)
