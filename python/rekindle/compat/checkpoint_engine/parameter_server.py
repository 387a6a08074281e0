"""checkpoint-engine's `ParameterServer`, over Rekindle's agents."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed

from ...errors import Error, InvalidError, NotFoundError
from .broadcast import Broadcast
from .buffers import DEFAULT_BYTES, device_key, is_cuda
from .channel import private_directory
from .engines import Handles
from .exchange import Exchange, RankError, SharedUpdate
from .registration import PartMeta, Registration, agreed, retire, retire_older
from .update import Rank, Source, deliver

_EXCHANGE_TIMEOUT = timedelta(minutes=5)
_PUBLISH_TIMEOUT = 600.0  # s
_GIB = 1 << 30


class ParameterServer:
    """One rank, beside one worker of an inference engine. Constructor and methods are those of
    checkpoint-engine 0.4.2, whose users' scripts import them under this name.

    Each rank registers its part of a checkpoint. In gather_metas(), all ranks publish their parts
    as one version, "NAME.checkpoint", and the agent of each rank's host keeps the part. An update
    brings the version to the worker of each rank that takes part: each device uploads a share, and
    the devices give it to each other. Weights stay when the processes that registered them end.
    """

    def __init__(self, *, rank: int | None = None, world_size: int | None = None,
                 auto_pg: bool = True, gpu_count: int | None = None,
                 mem_fraction: float | None = None, master_addr: str | None = None,
                 master_port: int | None = None, device: str | None = None,
                 agent: str | os.PathLike[str] | None = None,
                 socket_directory: str | os.PathLike[str] | None = None,
                 buffer_bytes: int | None = None) -> None:
        """rank, world_size, master_addr: default to RANK, WORLD_SIZE, MASTER_ADDR.

        gpu_count: GPUs of this host; rank r has GPU r modulo this. mem_fraction: the largest share
            of the device's free memory for the buffer; default PS_MEM_FRACTION, else 0.9.
        master_port: of the ranks' store; default MASTER_PORT + 1. auto_pg: an update destroys the
            process group that `init_process_group` has made.
        Not in checkpoint-engine: device ("cuda:1", "double:0"), agent (its store's directory),
        socket_directory (which the engine sees, too), buffer_bytes (default twice
        PS_MAX_BUCKET_SIZE_GB, else 1 GiB).
        """
        self._rank = _setting(rank, "RANK")
        self._world_size = _setting(world_size, "WORLD_SIZE")
        if not 0 <= self._rank < self._world_size:
            raise InvalidError(f"rank {self._rank} of {self._world_size}")
        self._device = device or _own_gpu(self._rank, gpu_count)
        if is_cuda(self._device):
            torch.cuda.set_device(torch.device(self._device))
        self._fraction = mem_fraction or float(os.environ.get("PS_MEM_FRACTION", "0.9"))
        if not 0 < self._fraction <= 1:
            raise InvalidError(f"mem_fraction {self._fraction} is not in (0, 1]")
        self._auto_pg, self._own_group = auto_pg, False
        self._agent = None if agent is None else os.fspath(agent)
        self._buffer_bytes = buffer_bytes or _environment_buffer()
        self._sockets = private_directory(socket_directory)
        self._registered: dict[str, Registration | None] = {}
        self._metas: dict[int, PartMeta] = {}
        self._updates = self._groups = 0
        self._exchange = Exchange(self._rank, self._world_size, _master(
            self._world_size, master_addr, master_port))

    def register_checkpoint(self, checkpoint_name: str, *, files: list[str] | None = None,
                            named_tensors: Mapping[str, torch.Tensor] | None = None,
                            use_shared_memory_pool: bool = False,
                            use_inplace_pin_memory: bool = True) -> None:
        """Takes this rank's part: whole tensors, of safetensors files and by name.

        Tensors by name are copied to host memory; files are mapped, and must not change before
        `gather_metas`, which publishes the part. Files are never removed. The last two arguments
        have no effect: the store reuses the memory of retired versions, and agents pin what they
        keep.
        InvalidError: the name is registered here already, or has characters other than A-Z a-z 0-9
        . _ / + -.
        """
        if checkpoint_name in self._registered:
            raise InvalidError(f"checkpoint '{checkpoint_name}' is registered already")
        part = Registration(checkpoint_name, files or [], named_tensors or {})
        self._registered[checkpoint_name] = part if part.part["tensors"] else None

    def unregister_checkpoint(self, checkpoint_name: str, force: bool = False) -> None:
        """Gives up this rank's part. The last rank to do so retires the version on all hosts, after
        updates that read it. Does nothing for a name that is not registered. `force` has no effect.
        """
        part = self._registered.pop(checkpoint_name, None)
        model = part.part["model"] if part is not None else ""
        if part is not None and model and self._exchange.count(f"unregistered/{model}") >= len(
                part.ranks):
            retire(model, self._agent)

    def gather_metas(self, checkpoint_name: str) -> None:
        """Publishes what the ranks have registered, unless they have done so before, and learns
        which part each rank has. All ranks call it together, before `update`.

        TimeoutError names a rank that did not call within 5 minutes. InvalidError: two ranks have
        tensors of one name that differ. When one rank fails, every rank raises an error.
        """
        mine = self._registered.get(checkpoint_name)
        everyone = self._exchange.gather("metas", mine and mine.said(), _EXCHANGE_TIMEOUT)
        self._metas = {}
        if not any(everyone):
            return
        model, ranks, is_new = agreed(checkpoint_name, everyone)
        if is_new:
            self._publish(mine, model, ranks)
        for rank in ranks:
            part: PartMeta = everyone[rank]["part"]
            part["model"] = model
            self._metas[rank] = part

    def _publish(self, mine: Registration | None, model: str, ranks: list[int]) -> None:
        failure: Exception | None = None
        if mine is not None:
            try:
                mine.publish(model, self._rank, ranks, self._agent, _PUBLISH_TIMEOUT)
            except (Error, OSError, RuntimeError) as error:
                failure = error
        outcomes = self._exchange.gather("published", failure and str(failure),
                                         timedelta(seconds=2 * _PUBLISH_TIMEOUT))
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text is not None]
        if failed:
            raise RankError(f"{model} is not published: {'; '.join(failed)}")
        if self._rank == ranks[0]:
            retire_older(model, self._agent)

    def get_metas(self) -> dict[int, PartMeta]:
        """Returns the part of each rank. It can be pickled or written as JSON, and given to
        `load_metas` of other ranks whose agents have the same coordinator. It is not in
        checkpoint-engine's format.
        """
        return dict(self._metas)

    def load_metas(self, metas: Mapping[int, PartMeta]) -> None:
        """Uses parts that other ranks have registered, for instances that join."""
        for rank, part in metas.items():
            if not isinstance(part, dict) or "model" not in part:
                raise InvalidError(f"metas of rank {rank} are none that get_metas() gave here")
        self._metas = {int(rank): part for rank, part in metas.items()}

    def init_process_group(self, *, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Initializes torch.distributed's default group for the caller. Nothing here needs it."""
        self._groups += 1
        store = torch.distributed.PrefixStore(f"group-{self._groups}", self._exchange.store)
        torch.distributed.init_process_group(
            backend="nccl" if is_cuda(self._device) else "gloo", world_size=self._world_size,
            rank=self._rank, timeout=timeout, store=store)
        self._own_group = True

    def store_based_barrier(self, timeout: timedelta = timedelta(minutes=5)) -> None:
        """Waits until all ranks have called it. TimeoutError: some have not."""
        self._exchange.gather("barrier", None, timeout)

    def update(self, checkpoint_name: str, req_func: Callable[[Handles], None], *,
               timeout: timedelta = timedelta(minutes=10), ranks: list[int] | None = None) -> None:
        """Brings the gathered or loaded parts to the engine's workers. All ranks call it.

        req_func: asks the engine to receive, and returns when it has. Each rank that takes part
            calls it with [(device key, address), …] of all ranks, in their order.
        ranks: those whose workers take part; None or []: all.
        timeout: for a worker to connect, for each of its answers, and for the other ranks at the
            end.

        When one rank fails, all that take part tell their workers to give up. Every rank raises its
        own error, or RankError with the errors of the others.
        """
        if not callable(req_func):
            raise InvalidError("req_func is required")
        taking = sorted(set(ranks or range(self._world_size)))
        self._updates += 1
        shared = SharedUpdate(self._exchange, self._rank, taking, f"update-{self._updates}")
        failure: BaseException | None = None
        try:
            self._update(checkpoint_name, req_func, taking, shared, timeout)
        except BaseException as error:
            failure = error
            raise
        finally:
            with contextlib.suppress(Error) if failure else contextlib.nullcontext():
                self._agree(checkpoint_name, failure, timeout)
            self._end_group()

    def _update(self, name: str, req_func: Callable[[Handles], None], taking: list[int],
                shared: SharedUpdate, timeout: timedelta) -> None:
        with contextlib.ExitStack() as stack:
            rank: Rank | None = None
            problem: Exception | None = None
            try:
                if self._rank in taking:
                    rank = self._open(stack, name, taking, shared, timeout.total_seconds())
            except (Error, OSError, RuntimeError) as error:
                # The other ranks must learn of the failure at once.
                problem = error
            mine = rank.handle if rank else (device_key(self._device), "")
            everyone = self._exchange.gather("sockets", [*mine, str(problem or "")], timeout)
            if problem is not None:
                raise problem
            failed = [f"rank {other}: {said[2]}" for other, said in enumerate(everyone) if said[2]]
            if failed:
                raise RankError(f"update of '{name}' has not begun: {'; '.join(failed)}")
            if rank is not None:
                handles = [(key, address) for key, address, _ in everyone]
                deliver([rank], lambda: req_func(handles), shared, timeout.total_seconds())

    def _open(self, stack: contextlib.ExitStack, name: str, taking: list[int],
              shared: SharedUpdate, timeout: float) -> Rank:
        if not self._metas:
            raise NotFoundError(f"no rank has registered '{name}', or gather_metas() was not "
                                f"called")
        metas = list(self._metas.values())
        model = metas[0]["model"]
        sizes = max(part["largest"] for part in metas), sum(part["total"] for part in metas)
        source = Source(model, self._device, sizes, agent=self._agent, attach_timeout=timeout,
                        timeout=timeout, stop=shared.failure)
        stack.callback(source.close)
        # One device alone needs none.
        broadcast = None if len(taking) == 1 else Broadcast(
            model, shared.group(), len(taking), shared, agent=self._agent, timeout=timeout)
        source.prepare(broadcast, self._rank)
        address = f"{self._sockets.name}/{self._updates}.sock"
        rank = Rank(source, address, shared, buffer_bytes=self._limit(), timeout=timeout)
        stack.callback(rank.close)
        return rank

    def _limit(self) -> int:
        if not is_cuda(self._device):
            return self._buffer_bytes
        free = torch.cuda.mem_get_info(torch.device(self._device))[0]
        return min(self._buffer_bytes, int(free * self._fraction))

    def _agree(self, name: str, failure: BaseException | None, timeout: timedelta) -> None:
        """Waits until all ranks are done, and raises on all when one has failed."""
        outcomes = self._exchange.gather("done", None if failure is None else str(failure), timeout)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text is not None]
        if failed and failure is None:
            raise RankError(f"update of '{name}' failed on {'; '.join(failed)}")

    def _end_group(self) -> None:
        if self._auto_pg and self._own_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._own_group = False


def _setting(given: int | None, name: str) -> int:
    if given is not None:
        return given
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise InvalidError(f"neither the argument nor {name} is a number: start it by torchrun, or "
                           f"give it") from None


def _own_gpu(rank: int, gpu_count: int | None) -> str:
    visible = torch.cuda.device_count()
    count = gpu_count or visible
    if not 0 < count <= visible:
        raise InvalidError(f"gpu_count {count}: {visible} GPUs are visible")
    return f"cuda:{rank % count}"


def _environment_buffer() -> int:
    gigabytes = os.environ.get("PS_MAX_BUCKET_SIZE_GB")
    return DEFAULT_BYTES if gigabytes is None else int(2 * float(gigabytes) * _GIB)


def _master(world: int, address: str | None, port: int | None) -> tuple[str, int] | None:
    if world == 1:
        return None
    address = address or os.environ.get("MASTER_ADDR")
    if port is None and os.environ.get("MASTER_PORT"):
        port = int(os.environ["MASTER_PORT"]) + 1  # the port itself is torchrun's
    if not address or port is None:
        raise InvalidError("several ranks need MASTER_ADDR and MASTER_PORT, or the arguments")
    return address, port
