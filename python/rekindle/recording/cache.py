"""Plans on disk, each under the fingerprint of everything that it depends on."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import marshal
import os
import platform
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._optional import no_collections
from ..errors import CorruptError
from .plan import Plan, from_bytes, to_bytes
from .targets import named_targets, storage_key
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
                loaders: Iterable[Any], key: Mapping[str, Any], *,
                record_device: str | torch.device = "cpu") -> str:
    """What a plan is valid for, as 32 hex digits.

    `loaders`: functions, classes or modules whose source decides; all files of their top packages'
    modules that are loaded count by their versions, those given here by their text. `key`: JSON
    values of the caller's: architecture and config, rank and size of each kind of parallelism,
    quantization. `record_device`: what stand-ins claim to be on. Of each target count name, shape,
    stride, dtype, device, and with which others it shares memory, and where.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(label: str, value: bytes) -> None:
        digest.update(f"{label} {len(value)}\n".encode() + value)

    def add_json(label: str, value: Any) -> None:
        add(label, json.dumps(value, sort_keys=True).encode())
    add_json("python", [sys.version_info[:2], sys.byteorder, platform.machine()])
    add_json("packages", _versions())
    add_json("own source", _own_source())
    add_json("loaders", [_source(loader) for loader in loaders])
    add_json("key", dict(key))
    add_json("record device", str(record_device))
    tensors = dict(targets) if isinstance(targets, Mapping) else named_targets(targets)
    with no_collections():
        for column in _catalog_columns(catalog):
            add("catalog", column)
        for column in _target_columns(tensors):
            add("targets", column)
    return digest.hexdigest()


# A column at a time: 100,000 calls of json or hash would take seconds.

def _catalog_columns(catalog: Mapping[str, TensorMeta]) -> Iterator[bytes]:
    metas = catalog.values()
    yield _packed(list(catalog))
    yield _packed([tuple(meta.shape) for meta in metas])
    yield _numbered([meta.dtype for meta in metas], str)


def _target_columns(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    values = list(tensors.values())
    yield _packed(list(tensors))
    yield _packed([tuple(tensor.shape) for tensor in values])
    yield _packed([tensor.stride() for tensor in values])
    yield _numbered([tensor.dtype for tensor in values], str)
    yield _numbered([tensor.device for tensor in values], str)
    yield _numbered([storage_key(tensor) for tensor in values], lambda key: "")
    yield _packed([tensor.storage_offset() for tensor in values])


def _packed(values: list[Any]) -> bytes:
    return marshal.dumps(values, 2)  # without references, which differ for equal values


def _numbered(values: list[Any], text: Callable[[Any], str]) -> bytes:
    """Each by the place of the first that is equal, and what the different ones are."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    places = array("Q", map(numbers.__getitem__, values))
    return _packed([text(value) for value in numbers]) + places.tobytes()


@functools.lru_cache(maxsize=None)
def _versions() -> dict[str, str | None]:
    """They do not change while modules of them are loaded."""
    return {name: _version(name) for name in _PACKAGES}


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


@functools.lru_cache(maxsize=None)
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
