"""What `attach` gives: a version's weights for this rank, while they arrive."""
from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi, _attaching, _files, _loading, errors
from ._attaching import Request, Shard, Spec
from ._device import DeviceLike, resolve
from ._listing import Listing
from ._native import Ended, Native, wait_until
from ._optional import no_collections
from ._views import BucketViews, HostViews, InfoReader
from .boxes import TensorInfo

if TYPE_CHECKING:
    import torch


def attach(model: str | None = None, version: str | int | None = "latest", *, shard: Shard = None,
           spec: Spec = None, instance: str | None = None, generation: int | None = None,
           rank: int | None = None, world: int | None = None, group: str | None = None,
           device: DeviceLike = None, stream: "torch.cuda.Stream | int | None" = None,
           bucket_bytes: int = 0, fallback_dir: str | os.PathLike[str] | None = None,
           agent: str | os.PathLike[str] | None = None,
           timeout: float | None = 10.0) -> "Session":
    """Attaches this process to a model's weights on the agent of this host.

    `model`: "qwen3", with `version` 41 or "latest"; None: `$REKINDLE_MODEL` and `$REKINDLE_SHARD`.
    `shard`: None is everything; "tp=3/8"; or boxes, `[Box("w", (0, 0), (16, 64)), "whole"]`.
    `spec`: how shards are cut: a dict, JSON text or a path; None: the built-in of the family.
    `instance`, `generation`, `rank`, `world`: its place among ranks that serve together.
    `group`: workers that move to new versions together, by `rekindle.update`.
    `device`: None is host memory; "cuda", "cuda:1", a `torch.device`, a GPU's UUID, "double:0".
    `stream`: whose work reads the buckets; None: torch's current one. `bucket_bytes`: 0 is the
    agent's choice. `fallback_dir`: safetensors files for when nobody alive holds the version.
    `agent`: the agent's store directory. `timeout`: seconds until the version and its sources are
    known; None: without end. What is not given is taken from what `rekindle run` has set.

    Raises any `rekindle.Error`: NotFoundError (no such version), UnavailableError (no agent),
    InvalidError, TimeoutError, DeniedError, ExhaustedError.
    """
    if model is None:
        model = _attaching.environment("MODEL")
        shard = shard if shard is not None else _attaching.environment("SHARD")
        if model is None:
            raise errors.InvalidError("attach to which model? Name it, or start this process by: "
                                      "rekindle run --model MODEL -- …")
    text, boxes = _attaching.split_shard(shard)
    world = _attaching.number(world, "WORLD", 1)
    request = Request(
        _attaching.model_version(model, version), text, boxes, _attaching.spec_json(spec),
        instance if instance is not None else _attaching.environment("INSTANCE"),
        _attaching.number(generation, "GENERATION", 0), _attaching.number(rank, "RANK", 0), world,
        group, fallback_dir, resolve(device, stream), bucket_bytes)
    store = agent if agent is not None else _attaching.environment("STORE")
    return Session(request, store, timeout)


class Session:
    """One attached version. A context manager; any thread, though tensors come to one at a time."""

    def __init__(self, request: Request, store: str | os.PathLike[str] | None,
                 timeout: float | None) -> None:
        """For `attach`."""
        self._store = store
        self._device = request.device
        self._native = self._open(request, timeout)
        self._turn = threading.RLock()
        self._reader = InfoReader()
        self._pending: Iterator[tuple[TensorInfo, Any]] = iter(())
        self._bucket_views: BucketViews | None = None
        self._listing: Listing | None = None
        self._files: dict[str, bytes] | None = None
        self._begun = False
        info = self._info()
        self._model, self._version = info.model, info.version

    def _open(self, request: Request, timeout: float | None) -> Native:
        begun = time.monotonic()
        native = Native(self._store, timeout)
        while True:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
            try:
                _attaching.attach_native(native, request, left)
                return native
            except errors.TimeoutError:
                if timeout is not None:
                    native.end()
                    raise
            except BaseException:
                # Close now, not when the traceback is freed.
                native.end()
                raise

    # --- what it is

    @property
    def model(self) -> str:
        return self._model

    @property
    def version(self) -> int:
        return self._version

    @property
    def device(self) -> str | None:
        """None: host memory."""
        return self._device.name if self._device else None

    @property
    def rung(self) -> str:
        """"local", "adopted", "peers" or "fallback": the lowest that it has come to so far."""
        return self._info().rung

    @property
    def device_path(self) -> str:
        """"ipc": the agent fills buckets that this process opens; "upload: WHY": this process
        uploads by itself; "": host memory."""
        return self._info().device_path

    @property
    def bytes_done(self) -> int:
        """That are in this host's memory, files too."""
        return self._info().bytes_done

    @property
    def bytes_total(self) -> int:
        return self._info().bytes_total

    @property
    def tensor_count(self) -> int:
        """Without files."""
        return len(self.tensors())

    @property
    def closed(self) -> bool:
        """Also when it belongs to a parent process."""
        try:
            self._native.check()
        except errors.StaleError:
            return True
        return False

    def tensors(self) -> list[TensorInfo]:
        """Every tensor, or box of one, in the order of their names; files are not among them."""
        listing = self._catalog()
        return [listing.infos[index] for index in listing.tensors]

    @property
    def files(self) -> Mapping[str, bytes]:
        """The small files that were published beside the weights: {"config.json": b"…"}.

        None came with boxes that do not name them."""
        if self._files is None:
            listing = self._catalog()
            names = [listing.infos[index].name for index in listing.files]
            self._files = _files.read(self._store, f"{self.model}@{self.version}", names)
        return self._files

    # --- tensors

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of each tensor, once, as soon as it is here and verified. Another loop
        goes on where one was left. A tensor is of the shape in `tensors()`, row-major and to be
        read only: a view of the host map, which it keeps; or of a bucket on the device, until the
        next tensor is asked for (what reads it is queued on the session's stream)."""
        for info, tensor in self.entries():
            yield info.name, tensor

    def entries(self, timeout: float | None = None) -> Iterator[tuple[TensorInfo, Any]]:
        """The same with each one's TensorInfo, which says which box it is. TimeoutError: none came
        for `timeout` seconds; ask again."""
        while True:
            yield from self._rest()
            if not self._take(timeout):
                return

    def buckets(self, timeout: float | None = None) -> Iterator[list[tuple[str, Any]]]:
        """Lists of (name, tensor), of what comes together: all views hold until the next list."""
        while True:
            bucket = [(info.name, tensor) for info, tensor in self._rest()]
            if bucket:
                yield bucket
            if not self._take(timeout):
                return

    def _rest(self) -> Iterator[tuple[TensorInfo, Any]]:
        self._native.check()
        while True:
            with self._turn, self._native.using():
                # The views are made of the library's memory.
                entry = next(self._pending, None)
            if entry is None:
                self._native.check()
                return
            yield entry

    def _take(self, timeout: float | None) -> bool:
        """Makes the next batch pending; False: there are no more."""
        with self._my_turn():
            function = "rk_next_bucket" if self._device else "rk_next"
            array, count = ctypes.c_void_p(), ctypes.c_size_t()
            wait_until(timeout, lambda ms: self._native.call(
                function, ms, ctypes.byref(array), ctypes.byref(count)))
            self._begun = True
            if not count.value:
                return False
            with self._native.using():
                self._pending = self._views_of(array.value or 0, count.value)
            return True

    def _views_of(self, array: int, count: int) -> Iterator[tuple[TensorInfo, Any]]:
        if self._device:
            if self._bucket_views is None:
                catalog = self._catalog()
                self._bucket_views = BucketViews(self._device, catalog.first, catalog.infos,
                                                 self._native)
            return self._bucket_views.of(array, count)
        entries = [(info, data) for info, data, _, _ in self._reader.read(array, count)
                   if not info.name.startswith(_abi.FILE_PREFIX)]
        return HostViews(self._native).of(entries)

    def load_into(self, target: Any, *, strict: bool = True,
                  timeout: float | None = 60.0) -> _loading.LoadResult:
        """Copies every tensor into `target`, in place, and returns when that is done.

        `target`: an `nn.Module`, or a mapping of names, or `Box`es, to tensors (torch, in host
        memory also numpy), or to lists of tensors that all get the same. On a session's device
        they are filled in batches, bucket by bucket, without Python in between; those of another
        dtype or place, or that are not contiguous, through a buffer. Shapes are equal, else
        InvalidError. `strict`: every target is found and every tensor used, else NotFoundError
        names the first and says how many; before anything is written. Without: the result names
        them. Tied targets are written once, and found by any of their names.
        Of 2048 tensors and more, buckets are taken into device memory of its own while the targets
        are looked at: 4 GiB and a quarter of what is free at most, until they are read.
        `timeout`: seconds without a new bucket; TimeoutError, call it again to go on.
        """
        return _loading.load_into(self, target, strict, timeout)

    def _catalog(self) -> Listing:
        if self._listing is None:
            array, count = ctypes.c_void_p(), ctypes.c_size_t()
            with self._my_turn(), self._native.using(), no_collections():
                self._native.call("rk_tensors", ctypes.byref(array), ctypes.byref(count))
                first = array.value or 0
                self._listing = Listing(self._reader.columns(first, count.value), self._native)
        return self._listing

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        self._native.check()  # before the lock: another thread may have held it during fork()
        with self._turn:
            yield

    # --- instances and versions

    def loaded(self) -> None:
        """Says that this rank has taken in every tensor; does not wait. InvalidError before all
        were handed out."""
        self._native.call("rk_loaded")

    def commit(self, timeout: float | None = None) -> None:
        """loaded(), and then until every rank of the instance has loaded the same version: only
        now may it serve. UnavailableError names the rank that failed and why; again waits for its
        next start."""
        self.loaded()
        wait_until(timeout, lambda ms: self._native.call("rk_wait_commit", ms))

    def wait_for_update(self, timeout: float | None = None) -> int | None:
        """Until the model has a newer version, or an update has begun for the group: its number.
        None: not within `timeout` seconds. Attach again for it, with the next generation."""
        version = ctypes.c_uint64()
        try:
            wait_until(timeout, lambda ms: self._native.call(
                "rk_wait_update", ms, ctypes.byref(version)))
        except errors.TimeoutError:
            return None
        return version.value

    # --- the end

    def close(self) -> None:
        """Detaches. Again: nothing. Views of the host map put that off until the last of them is
        gone; views of buckets end with it. Calls in other threads end within a second."""
        self._pending = iter(())
        self._bucket_views = None
        if self._device:
            self._native.end()
        else:
            self._native = Ended()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return (f"<rekindle.Session {self.model}@{self.version} on {self.device or 'the host'}"
                f"{', closed' if self.closed else ''}>")

    def _info(self) -> "_Info":
        info = _abi.SessionInfo(size=ctypes.sizeof(_abi.SessionInfo))
        with self._native.using():
            self._native.call("rk_info", ctypes.byref(info))
            return _Info(info.model.decode(), info.version, info.tensors, info.bytes_done,
                         info.bytes_total, info.rung.decode(), info.device_path.decode())


class _Info(NamedTuple):
    model: str
    version: int
    tensors: int  # files too
    bytes_done: int
    bytes_total: int
    rung: str
    device_path: str
