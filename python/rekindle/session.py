"""A session: a version's weights for this rank, while they arrive."""
from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi, _attaching, _files, _loading, errors, orders, standby
from ._attaching import Request, Shard, Spec
from ._device import DeviceLike, resolve
from ._listing import Listing
from ._native import Ended, Native, milliseconds, wait_until
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
           staged: bool = False, resident_key: str | None = None,
           resident_shared: bool = False,
           agent: str | os.PathLike[str] | None = None, timeout: float | None = 10.0) -> "Session":
    """Attaches this process to a model's weights on the agent of this host.

    `model`: "qwen3", with `version` 41 or "latest"; None: `$REKINDLE_MODEL` and `$REKINDLE_SHARD`.
    `shard`: None is everything; "tp=3/8"; or boxes, `[Box("w", (0, 0), (16, 64)), "whole"]`.
    `spec`: the rules of shards: a dict, JSON text or a path; None: the built-in of the family.
    `instance`, `generation`, `rank`, `world`: its place among ranks that serve together.
    `group`: workers that move to new versions together, by `rekindle.update`.
    `device`: None is host memory; "cuda", "cuda:1", a `torch.device`, a GPU's UUID, "double:0".
    `stream`: the stream whose work reads the buckets; None: torch's current one. `bucket_bytes`: 0:
    the agent chooses. `fallback_dir`: safetensors files for the case that no live host holds the
    version. `staged`: the session has no rank of the instance before `begin_switch`, so that the
    instance stays ready with the version that it serves. `resident_key`: takes the resident copy
    with this key and nothing else; NotFoundError or UnavailableError says why there is none.
    `resident_shared`: one that several workers read at the same time; this process only reads it.
    `agent`: the agent's store directory. `timeout`: seconds until the version and its sources are
    known; None: without end. Missing arguments come from the environment that `rekindle run` sets.

    Raises any `rekindle.Error`: NotFoundError (no such version), UnavailableError (no agent),
    InvalidError, TimeoutError, DeniedError, ExhaustedError."""
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
        group, fallback_dir, resolve(device, stream), bucket_bytes, staged, resident_key,
        resident_shared)
    store = agent if agent is not None else _attaching.environment("STORE")
    return Session(request, store, timeout)


class Session:
    """One attached version. A context manager, for any thread. One thread at a time gets
    tensors."""

    def __init__(self, request: Request, store: str | os.PathLike[str] | None,
                 timeout: float | None) -> None:
        """Called by `attach`."""
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
        # Set where the agent has taken the copy.
        self._resident = False
        self._committed: list[Callable[[], None]] = []
        # These do not wait for the list of the tensors, so that a load begins to copy before.
        self._model, self._version = self._named()

    def _open(self, request: Request, timeout: float | None) -> Native:
        # A standby waits as long as it has to. The timeout is that of the attach.
        standby.wait()
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

    # --- properties

    @property
    def model(self) -> str:
        return self._model

    @property
    def version(self) -> int:
        return self._version

    @property
    def device(self) -> str | None:
        """The name of the device; None: host memory."""
        return self._device.name if self._device else None

    @property
    def rung(self) -> str:
        """"resident", "local", "adopted", "peers" or "fallback": the lowest source so far."""
        return self._info().rung

    @property
    def resident(self) -> bool:
        """Whether the parameters of this worker lie in memory that outlives the process, and the
        agent has sealed them for a successor. It may have dropped this copy since: `rekindle
        status` shows those that it keeps."""
        return self._resident and not self.closed

    @property
    def device_path(self) -> str:
        """"ipc": the agent fills buckets that this process opens; "upload: WHY": this process
        uploads by itself; "": host memory."""
        return self._info().device_path

    @property
    def bytes_done(self) -> int:
        """Bytes of this session already in this host's memory, including its files."""
        return self._info().bytes_done

    @property
    def bytes_total(self) -> int:
        return self._info().bytes_total

    @property
    def tensor_count(self) -> int:
        """The number of tensors and boxes, without files."""
        return len(self.tensors())

    @property
    def closed(self) -> bool:
        """Whether it was closed or belongs to a parent process."""
        try:
            self._native.check()
        except errors.StaleError:
            return True
        return False

    def tensors(self) -> list[TensorInfo]:
        """Returns every tensor, or box of one, sorted by name, without files."""
        listing = self._catalog()
        return [listing.infos[index] for index in listing.tensors]

    @property
    def files(self) -> Mapping[str, bytes]:
        """The small files that were published beside the weights: {"config.json": b"…"}.

        Empty for a session of boxes, unless the boxes name files."""
        if self._files is None:
            listing = self._catalog()
            names = [listing.infos[index].name for index in listing.files]
            self._files = _files.read(self._store, f"{self.model}@{self.version}", names)
        return self._files

    # --- tensors

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, tensor) once for each tensor, as soon as it is on this host and verified.

        Breaking out of a loop is safe: the next loop resumes where it stopped. A tensor has its
        shape in `tensors()`, is row-major, and is only for reading. In host memory it is a view and
        keeps the host map. On a device it is a view of a bucket, valid until the caller takes the
        next tensor: queue its reads on the session's stream before."""
        for info, tensor in self.entries():
            yield info.name, tensor

    def entries(self, timeout: float | None = None) -> Iterator[tuple[TensorInfo, Any]]:
        """Yields (TensorInfo, tensor). The TensorInfo tells which box it is. TimeoutError: no
        tensor came for `timeout` seconds; call again to continue."""
        while True:
            yield from self._rest()
            if not self._take(timeout):
                return

    def buckets(self, timeout: float | None = None) -> Iterator[list[tuple[str, Any]]]:
        """Yields lists of (name, tensor) that arrive together. All views hold until the next
        list."""
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
                # Making a view reads the library's memory.
                entry = next(self._pending, None)
            if entry is None:
                self._native.check()
                return
            yield entry

    def _take(self, timeout: float | None) -> bool:
        """Makes the next batch pending. Returns False when there are no more."""
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

        `target`: an `nn.Module`, or a mapping of names or `Box`es to tensors (torch, in host memory
        also numpy) or to lists of tensors that all get the same values. On the session's device,
        the library fills them in batches, bucket by bucket, without Python in between. Targets of
        another dtype or place, or that are not contiguous, are filled through a buffer. Shapes must
        be equal, else InvalidError. `strict`: every target must have a tensor, and every tensor a
        target. Else NotFoundError names the first and the count, before anything is written.
        Without `strict`, the result has the names. Tied targets are written once, and found by any
        of their names.
        With 2048 tensors or more, buckets are copied to separate device memory while the targets
        are checked, until they are read: at most 4 GiB, and at most a quarter of the free memory.
        `timeout`: seconds without a new bucket. TimeoutError: call again to continue."""
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
        # Checked before the lock, which another thread may have held during fork().
        self._native.check()
        with self._turn:
            yield

    def stage(self, reserve: int = 1 << 30, timeout: float | None = 60.0) -> None:
        """Takes every tensor into memory of its own on the session's device, and returns when all
        are there. Taking or loading them then waits for nothing but copies on the device, and frees
        this memory. Without a device, returns when all are in this host's memory.

        `reserve`: bytes of the device that stay free. ExhaustedError, with the numbers: there is no
        room. Then load at once, or close the session. `timeout`: seconds without a new bucket.
        TimeoutError: call again to continue. InvalidError: the caller has taken a bucket, and still
        reads it. Free memory is what the device's driver reports: memory that torch keeps for later
        is not free."""
        if self._device is None:
            arrived = list(self.entries(timeout))
            self._pending = iter(arrived)
            return
        _loading.go_on(self, timeout,
                       lambda ms: self._native.call("rk_stage", reserve, max(1, ms)))

    def check_stage(self, reserve: int = 1 << 30) -> None:
        """Raises ExhaustedError where `stage` would have no room now. Takes nothing."""
        if self._device is not None:
            with contextlib.suppress(errors.TimeoutError):
                self._native.call("rk_stage", reserve, 0)

    # --- instances and versions

    def begin_switch(self, timeout: float = 10.0) -> None:
        """For a session that was attached with `staged`: it has its rank of the instance from now
        on, in place of the session that served. Call it before the first write to what serves.
        InvalidError: other ranks switch to another version; nothing has changed."""
        self._native.call("rk_begin_switch", milliseconds(timeout))

    def report_phases(self, seconds: Mapping[str, float],
                      ago: Mapping[str, float] | None = None) -> None:
        """Tells `rekindle update` how long the phases of an update took here: "declare", "copy",
        "spread", "verify", "apply", "resume". `ago`: how many seconds ago each of them began, for
        `rekindle trace`. InvalidError: another name, or one without its `ago`. Each call replaces
        the last one."""
        phases = (_abi.Phase * len(seconds))(*(
            _abi.Phase(name.encode(), round(took * 1e6)) for name, took in seconds.items()))
        if ago is None:
            self._native.call("rk_report_phases", phases, len(seconds))
            return
        if missing := seconds.keys() - ago.keys():
            raise errors.InvalidError("report_phases: `ago` does not say when these phases began: "
                                      f"{', '.join(sorted(missing))}")
        begun = (ctypes.c_uint64 * len(seconds))(*(
            max(round(ago[name] * 1e6), 0) for name in seconds))
        self._native.call("rk_report_phases_ago", phases, begun, len(seconds))

    def loaded(self) -> None:
        """Reports that this rank has loaded every tensor. Does not wait. InvalidError: not all
        tensors were handed out yet."""
        self._native.call("rk_loaded")

    def commit(self, timeout: float | None = None) -> None:
        """Calls loaded(), then waits until every rank of the instance has loaded the same version.
        Only then may the rank serve. UnavailableError names a rank that failed and why; call again
        to wait for that rank's next start."""
        self.loaded()
        wait_until(timeout, lambda ms: self._native.call("rk_wait_commit", ms))
        while self._committed:
            self._committed.pop(0)()

    def after_commit(self, call: Callable[[], None]) -> None:
        """Calls `call` once, in the next commit() of this session, when the rank may serve. Its time
        is not part of the time-out."""
        self._committed.append(call)

    def wait_for_update(self, timeout: float | None = None) -> int | None:
        """Waits until the model has a newer version, or an update of the group has begun. Returns
        its number; None: there was none for `timeout` seconds. Attach again to get it, with the
        next generation."""
        version = ctypes.c_uint64()
        try:
            wait_until(timeout, lambda ms: self._native.call(
                "rk_wait_update", ms, ctypes.byref(version)))
        except errors.TimeoutError:
            return None
        return version.value

    def next_order(self, timeout: float | None = 0.0) -> "orders.Order | None":
        """Waits for an order of the agent, such as that of `rekindle switch`. None: there was none
        for `timeout` seconds. Call it between two steps, also with 0: the agent gives the order
        when every rank that gets it has called, and later calls find it. UnavailableError: the
        agent is older and gives no orders."""
        return orders.wait_for(self, self._native, timeout)

    def mend(self, timeout: float = 60.0) -> None:
        """Has the agent write the right bytes over wrong ones of the resident parameters. Call it
        for an order "mend", while no work uses them. CorruptError: that is not possible, and the
        session has ended; the worker must end, too, and the next one loads."""
        self._native.call("rk_resident_mend", milliseconds(timeout))

    # --- the end

    def close(self) -> None:
        """Detaches. A second call does nothing. If views of the host map exist, the session
        detaches with the last of them. Views of buckets end at once. Calls in other threads end
        within a second."""
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

    def _named(self) -> tuple[str, int]:
        found = _abi.SessionVersion(size=ctypes.sizeof(_abi.SessionVersion))
        with self._native.using():
            self._native.call("rk_info", ctypes.byref(found))
            return found.model.decode(), found.version

    def _count(self) -> int:
        """The number of tensors and boxes, with files."""
        count = ctypes.c_size_t()
        self._native.call("rk_tensor_count", ctypes.byref(count))
        return count.value

    def _info(self) -> "_Info":
        info = _abi.SessionInfo(size=ctypes.sizeof(_abi.SessionInfo))
        with self._native.using():
            self._native.call("rk_info", ctypes.byref(info))
            return _Info(info.bytes_done, info.bytes_total, info.rung.decode(),
                         info.device_path.decode())


class _Info(NamedTuple):
    bytes_done: int
    bytes_total: int
    rung: str
    device_path: str
