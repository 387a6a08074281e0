"""Publishes a trainer's weights: copies its tensors straight into segments of the agent's store."""
from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from . import _abi, _dense, command, dtypes
from ._attaching import environment
from ._host_copies import HostCopies
from ._native import milliseconds
from ._optional import module
from ._pinned_copies import release_pinned as release_pinned
from ._publishing import Announced, Publication
from .errors import InvalidError

PathLike = Union[str, "os.PathLike[str]"]
CONNECT_S = 5.0


class Published(NamedTuple):
    model: str
    version: int
    tensors: int  # without files
    bytes: int  # of the tensors


def check_tensor_name(name: str) -> None:
    """Such a name would become a file on the disk of everyone who pulls the version."""
    if str(name).startswith(_abi.FILE_PREFIX):
        raise InvalidError(f"tensor {name!r}: names that begin with {_abi.FILE_PREFIX} are kept for "
                           "small files; rename the tensor, or give the file as one")


def publish(source: Any, model_version: str, *, files: Mapping[str, bytes] | None = None,
            sign_key: PathLike | None = None, agent: PathLike | None = None,
            timeout: float | None = 600.0) -> Published:
    """Publishes "qwen3@42" on the agent of this host. Workers can then attach to it.

    `source`: a mapping of names to tensors (torch on any device, or numpy) or a module, copied
    straight into segments; or one or several paths: a checkpoint directory or safetensors files.
    `files`: small files beside the tensors, {"config.json": b"…"}; a directory has its own. Their
    names end in .json .txt .model .jinja .tiktoken or .py, and have at most one folder.
    `sign_key`: a file with the key that signs the version, if `source` is paths. Tensors are signed
    by the agent: `rekindle agent --sign-key`.
    `timeout`: seconds for the agent to digest the tensors. A version is published in full or not at
    all.
    A GPU's tensors are copied after the work that the current stream of their device has at the
    call. No stream of the caller waits. All tensors are copied when the call returns; until then,
    nothing may write to them. 128 MiB of pinned memory, and 32 MiB on each GPU, stay for the next
    call, until `publication.release_pinned()`.
    Raises DeniedError (the version exists with other bytes), InvalidError (naming a tensor without
    a dtype in safetensors, without memory, or not dense), ExhaustedError, UnavailableError."""
    if isinstance(source, str | os.PathLike) or (
            isinstance(source, Sequence) and not hasattr(source, "shape")):
        return _publish_paths(source, model_version, files, sign_key, agent, timeout)
    if sign_key is not None:
        raise InvalidError("sign_key is for paths; the agent signs tensors: "
                           "rekindle agent --sign-key FILE")
    if not isinstance(source, Mapping) and hasattr(source, "state_dict"):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise InvalidError(f"publish a {type(source).__name__}? Give a mapping of names to "
                           "tensors, a module or a path")
    for name in source:
        check_tensor_name(name)
    sources = [_Source(name, tensor) for name, tensor in source.items()]
    file_sources = [_Source(_abi.FILE_PREFIX + name, memoryview(data).cast("B"))
                    for name, data in (files or {}).items()]
    if not sources:
        raise InvalidError(f"publish {model_version} without a tensor")
    milliseconds(timeout)
    _publish_tensors(sources + file_sources, model_version, agent, timeout)
    model, _, version = model_version.rpartition("@")
    return Published(model, int(version), len(sources), sum(one.nbytes for one in sources))


def _publish_paths(source: Any, model_version: str, files: Mapping[str, bytes] | None,
                   sign_key: PathLike | None, agent: PathLike | None,
                   timeout: float | None) -> Published:
    if files:
        raise InvalidError("files go beside tensors: a directory has its own")
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    agent = agent if agent is not None else environment("STORE")
    store = ["--store", agent] if agent is not None else []
    sign = ["--sign-key", sign_key] if sign_key is not None else []
    answer = command.run("publish", model_version, *paths, *store, *sign, timeout=timeout)
    return Published(answer["model"], answer["version"], answer["tensors"], answer["bytes"])


class _Source:
    """A tensor to copy: of torch, of numpy, or a buffer of bytes (U8)."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.name, self.tensor = name, tensor
        torch = module("torch")
        if torch is not None and isinstance(tensor, torch.Tensor):
            _dense.check(name, tensor)
            self.dtype = _dense.dtype_name(name, tensor.dtype)
        elif hasattr(tensor, "__array_interface__"):
            self.dtype = self._numpy_dtype()
        elif isinstance(tensor, memoryview):
            self.dtype = "U8"
        else:
            raise InvalidError(f"'{name}' is a {type(tensor).__name__}, not a tensor")
        self.shape = tuple(int(extent) for extent in tensor.shape)
        self.nbytes = dtypes.itemsize(self.dtype) * math.prod(self.shape)

    def _numpy_dtype(self) -> str:
        try:
            return dtypes.numpy_dtype_name(self.tensor.dtype)
        except InvalidError as why:
            raise InvalidError(f"'{self.name}': {why}") from None


def _publish_tensors(sources: Sequence[_Source], model_version: str, agent: PathLike | None,
                     timeout: float | None) -> None:
    announced = [Announced(one.name, one.dtype, one.shape) for one in sources]
    publication = Publication(model_version, announced, agent, CONNECT_S)
    try:
        places = [publication.place(index) for index in range(len(sources))]
        with HostCopies(publication.open_copies, streaming=False) as copies:
            # In the order of the segments, so that neighbours are copied together, and the agent
            # gets one segment after the other.
            for index in sorted(range(len(sources)), key=lambda i: ctypes.addressof(places[i])):
                copies.add(sources[index].tensor, places[index])
            copies.finish()
        publication.commit(timeout)
    finally:
        publication.end()
