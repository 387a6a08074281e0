"""SGLang: load format `rekindle`, updates of a running server, and a custom weight loader.

    python -m sglang.launch_server --model-path MODEL --load-format rekindle \\
        --model-loader-extra-config '{"model": "qwen3"}'

SGLang finds `plugin` by the entry point group `sglang.srt.plugins`.
`POST /update_weights_from_disk {"model_path": …, "load_format": "rekindle"}` updates a running
server. A server that was started with `--custom-weight-loader rekindle.sglang.load` can also be
updated by
`Engine.update_weights_from_tensor(version("qwen3", 42), load_format="rekindle.sglang.load")`
between `begin_weight_update()` and `end_weight_update()`. See docs/guides/engines.md.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["load", "plugin", "stage", "version"]

_SCHEME = "rekindle://"
_STAGE_SCHEME = "rekindle-stage://"


def plugin() -> None:
    """Registers load format `rekindle`, once. InvalidError for an unknown SGLang."""
    from . import versions
    versions.check()
    from .hooks import register
    register()


def version(model: str, version: str | int = "latest") -> "list[tuple[str, torch.Tensor]]":
    """Returns the argument for `Engine.update_weights_from_tensor` with which `load` attaches to
    this version."""
    import torch
    return [(f"{_SCHEME}{model}@{version}", torch.zeros(1))]


def stage(model: str, version: str | int = "latest") -> "list[tuple[str, torch.Tensor]]":
    """Returns the argument for `Engine.update_weights_from_tensor` with which `load` begins to take
    this version into memory beside the one that serves. Send it while the engine serves, with
    `flush_cache=False` and outside of an update. A later `version()` of the same version loads it
    from there."""
    import torch
    return [(f"{_STAGE_SCHEME}{model}@{version}", torch.zeros(1))]


def load(model: "torch.nn.Module", named_tensors: "list[tuple[str, torch.Tensor]]") -> None:
    """Loads a version that `version()` names, and gives other tensors to the model's own loader.

    SGLang calls this in every rank, between its `begin_weight_update` and `end_weight_update`,
    which post-process. This attaches to the version by the options of the load format if that was
    used, else by the environment (REKINDLE_STORE, …), fills the model and keeps the session.

    When it fails on one rank, it raises on all, and names parameters without weights. The model
    must not serve then."""
    others: list[tuple[str, Any]] = []
    for name, tensor in named_tensors:
        if name.startswith(_STAGE_SCHEME):
            from .updating import stage_to
            stage_to(model, *_split(name[len(_STAGE_SCHEME):]))
        elif name.startswith(_SCHEME):
            from .updating import update_to
            update_to(model, *_split(name[len(_SCHEME):]))
        else:
            others.append((name, tensor))
    if others:
        model.load_weights(others)


def _split(text: str) -> tuple[str, str]:
    name, _, number = text.rpartition("@")
    return (name, number) if name else (number, "latest")
