"""Plans on disk, each under the fingerprint of everything that it depends on."""
from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CorruptError
from .plan import Plan, from_bytes, to_bytes
from .targets import named_targets
from .tracer import TensorMeta

if TYPE_CHECKING:
    import torch
    from torch import nn

_PACKAGES = ("rekindle", "torch", "transformers", "vllm", "sglang")


def cache_directory() -> Path:
    """$REKINDLE_CACHE, or ~/.cache/rekindle (under $XDG_CACHE_HOME where that is set); its `plans`.
    """
    root = os.environ.get("REKINDLE_CACHE")
    if root:
        return Path(root) / "plans"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle" / "plans"


def fingerprint(catalog: Mapping[str, TensorMeta], targets: nn.Module | Mapping[str, torch.Tensor],
                loaders: Iterable[Any], key: Mapping[str, Any]) -> str:
    """What a plan is valid for, as 32 hex digits.

    `loaders`: functions, classes or modules whose source decides; all files of their top packages'
    modules that are loaded count by their versions, those given here by their text. `key`: JSON
    values of the caller's: architecture and config, rank and size of each kind of parallelism,
    quantization.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(label: str, value: Any) -> None:
        digest.update(json.dumps([label, value], sort_keys=True).encode() + b"\n")
    add("python", [sys.version_info[:2], sys.byteorder, platform.machine()])
    add("packages", {name: _version(name) for name in _PACKAGES})
    add("own source", [_own_source()])
    add("loaders", [_source(loader) for loader in loaders])
    add("key", dict(key))
    add("catalog", [[name, list(meta.shape), str(meta.dtype)] for name, meta in catalog.items()])
    tensors = dict(targets) if isinstance(targets, Mapping) else named_targets(targets)
    first: dict[int, str] = {}
    add("targets", [[name, list(t.shape), list(t.stride()), str(t.dtype),
                     first.setdefault(t.untyped_storage()._cdata, name), t.storage_offset()]
                    for name, t in tensors.items()])
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source(thing: Any) -> list[str]:
    """Name and text of the module that has the thing's code: a change anywhere in it counts."""
    module = thing if inspect.ismodule(thing) else inspect.getmodule(inspect.unwrap(thing))
    try:
        text = inspect.getsource(module or thing)
    except (OSError, TypeError) as reason:
        raise ValueError(f"{thing!r} has no source to take a fingerprint of") from reason
    return [getattr(thing, "__qualname__", repr(type(thing))), text]


def _own_source() -> str:
    """The recorder's own code: another one may follow loaders in another way."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(key: str) -> Plan | None:
    """The plan under a fingerprint; None when there is none, or it is damaged (it is removed then).
    """
    path = cache_directory() / f"{key}.plan"
    try:
        return from_bytes(path.read_bytes(), key)
    except FileNotFoundError:
        return None
    except (CorruptError, ValueError, KeyError, TypeError, OSError):
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def store(key: str, plan: Plan) -> bool:
    """Writes it at once or not at all. False when it may not be cached or the directory cannot be
    written.
    """
    if not plan.replayable:
        return False
    directory = cache_directory()
    temporary = None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(to_bytes(plan, key))
        os.replace(temporary, directory / f"{key}.plan")
        return True
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False


def cached(key: str, make: Callable[[], Plan]) -> Plan:
    """The plan under a fingerprint, made and stored when there is none."""
    plan = load(key)
    if plan is None:
        plan = make()
        store(key, plan)
    return plan
