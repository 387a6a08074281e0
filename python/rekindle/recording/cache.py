"""Plans on disk, each under the fingerprint of everything that it depends on."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._optional import no_collections, version
from ..errors import CorruptError
from . import columns
from .plan import Plan, from_bytes, to_bytes
from .targets import named_targets

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .tracer import TensorMeta

_PACKAGES = ("rekindle", "torch", "transformers", "vllm", "sglang")


def cache_directory() -> Path:
    """Returns `plans` in $REKINDLE_CACHE, else in ~/.cache/rekindle (or under $XDG_CACHE_HOME)."""
    root = os.environ.get("REKINDLE_CACHE")
    if root:
        return Path(root) / "plans"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle" / "plans"


def fingerprint(catalog: Mapping[str, TensorMeta], targets: nn.Module | Mapping[str, torch.Tensor],
                loaders: Iterable[Any], key: Mapping[str, Any], *,
                record_device: str | torch.device = "cpu") -> str:
    """Returns a digest of everything that a plan depends on, as 32 hex digits.

    `loaders`: functions, classes or modules whose source decides; the text of their modules counts.
    Of rekindle, torch, transformers, vllm and sglang the version counts. `key`: JSON values of the
    caller: architecture and config, rank and size of each kind of parallelism, quantization.
    `record_device`: the device that stand-ins claim. Of each target count name, shape, stride,
    dtype, device, the targets that share its memory, and its place there.
    """
    digest = hashlib.sha256()  # CPUs have instructions for it

    def add(label: str, value: bytes) -> None:
        digest.update(f"{label} {len(value)}\n".encode())
        digest.update(value)

    def add_json(label: str, value: Any) -> None:
        add(label, json.dumps(value, sort_keys=True).encode())
    add_json("python", [sys.version_info[:2], sys.byteorder, platform.machine()])
    add_json("packages", _versions())
    add_json("own source", _own_source())
    add_json("loaders", [_source(loader) for loader in loaders])
    add_json("key", dict(key))
    add_json("record device", str(record_device))
    tensors = targets if isinstance(targets, Mapping) else named_targets(targets)
    with no_collections():
        for column in columns.of_catalog(catalog):
            add("catalog", column)
        for column in columns.of_targets(tensors):
            add("targets", column)
    return digest.hexdigest()[:32]


@functools.lru_cache(maxsize=None)
def _versions() -> dict[str, str | None]:
    """Returns the versions of packages. They do not change while their modules are loaded."""
    return {name: version(name) for name in _PACKAGES}


def _source(thing: Any) -> list[str]:
    """Returns the name of `thing` and the text of its module: any change of the module counts."""
    module = thing if inspect.ismodule(thing) else inspect.getmodule(inspect.unwrap(thing))
    try:
        text = inspect.getsource(module or thing)
    except (OSError, TypeError) as reason:
        raise ValueError(f"{thing!r} has no source to take a fingerprint of") from reason
    return [getattr(thing, "__qualname__", repr(type(thing))), text]


@functools.lru_cache(maxsize=None)
def _own_source() -> str:
    """Returns a digest of the recorder's own code: another recorder may follow loaders differently.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(key: str) -> Plan | None:
    """Returns the plan under a fingerprint; None: there is none, or it was damaged and is removed.
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
    """Writes a plan in full or not at all. Returns False when it must not or cannot be cached, or
    the directory cannot be written.
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
    except (OSError, ValueError):
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False


def cached(key: str, make: Callable[[], Plan]) -> Plan:
    """Returns the plan under a fingerprint. Makes and stores it when there is none."""
    plan = load(key)
    if plan is None:
        plan = make()
        store(key, plan)
    return plan
