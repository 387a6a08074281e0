"""checkpoint-engine's own receiver over CUDA IPC, fed from an agent's buckets: on real GPUs.

    python -m pytest tests/python/gpu/test_checkpoint_engine_gpu.py

Needs torch with CUDA, pyzmq and checkpoint-engine. Without a GPU these are skipped, and fail when
REKINDLE_REQUIRE_GPU is set, as where there has to be one.
"""
import os

import pytest
import torch
from checkpoint_engine_receiver import Receiver, digest
from conftest import PATIENCE_S, gpu_fleet
from test_checkpoint_engine_parameter_server import UPDATES, update_ranks
from test_checkpoint_engine_serve import last_round

import rekindle as rk
from rekindle.compat import checkpoint_engine as ce
from rekindle.compat.checkpoint_engine import channel
from rekindle.compat.checkpoint_engine.buffers import device_key

PATIENCE_LONG_S = 3 * PATIENCE_S  # a first CUDA context takes seconds


@pytest.fixture(scope="module")
def fleet(memory_directory):
    with gpu_fleet(memory_directory,
                   "checkpoint-engine's receiver has not run over CUDA IPC") as running:
        yield running


@pytest.fixture(scope="module")
def devices():
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


@pytest.fixture(scope="module")
def published(fleet):
    """1.2 GB: small tensors of several dtypes, 64 of 16 MiB, and one of 160 MiB."""
    random = torch.Generator().manual_seed(5)

    def bf16(*shape):
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    tensors = {f"layers.{index}.w": bf16(2048, 4096) for index in range(64)}
    tensors |= {f"layers.{index}.norm": bf16(4096 + index) for index in range(200)}
    tensors |= {"fp8": bf16(64, 64).to(torch.float8_e4m3fn), "scale": torch.tensor(0.5),
                "empty": bf16(0, 8), "mask": torch.tensor([True, False, True]),
                "embedding": bf16(20480, 4096)}
    rk.publish(tensors, "gpu@1", agent=fleet.store("a"))
    return {name: [str(tensor.dtype), list(tensor.shape), digest(tensor)]
            for name, tensor in tensors.items()}


def receive(handles, options=()):
    """A receiver for each device; its reports, by rank."""
    workers = [Receiver(address, "--device", index, *options)
               for index, (_, address) in enumerate(handles)]
    return [worker.report(PATIENCE_LONG_S) for worker in workers]


@pytest.mark.parametrize("buffer_bytes", [1 << 30, 64 << 20])
def test_one_worker_over_cuda_ipc(fleet, published, buffer_bytes):
    with channel.private_directory() as sockets, rk.attach(
            "gpu", 1, device="cuda:0", agent=fleet.store("a"), timeout=PATIENCE_LONG_S) as session:
        worker = Receiver(f"ipc://{sockets}/0.sock")
        ce.send(session, f"{sockets}/0.sock", "cuda:0", buffer_bytes=buffer_bytes)
        assert session.device_path == "ipc", session.device_path
        [report] = worker.report(PATIENCE_LONG_S)
    assert report["tensors"] == published and report["twice"] == [] and report["hook"] == 1
    assert report["buckets"] > 1


def test_all_gpus_and_a_draft_model(fleet, published, devices):
    reports = []

    def request(handles):
        assert [key for key, _ in handles] == [device_key(device) for device in devices]
        reports.extend(receive(handles, ["--passes", 2]))

    served = ce.serve_to(request, "gpu", devices=devices, agent=fleet.store("a"),
                         attach_timeout=PATIENCE_LONG_S)
    assert (served.passes, served.devices) == (2, len(devices))
    for report in reports:
        assert [one["tensors"] for one in report] == [published, published]


def two_gpus(devices):
    if len(devices) < 2:
        pytest.skip(f"needs 2 GPUs, there are {len(devices)}")


def test_gpus_share_the_uploads(fleet, published, devices):
    two_gpus(devices)
    reports = []
    # The second update uses the communicator of the first.
    for _ in range(2):
        ce.serve_to(lambda handles: reports.extend(receive(handles)), "gpu", devices=devices,
                    agent=fleet.store("a"), attach_timeout=PATIENCE_LONG_S)
    assert [one["tensors"] for report in reports for one in report] == [published] * len(reports)
    done = last_round(fleet, "gpu")
    assert done["ready"] == done["by_broadcast"] == len(devices), done


@pytest.mark.parametrize("case", UPDATES)
def test_checkpoint_engines_own_test_of_updates(fleet, tmp_path, devices, case):
    """On all GPUs, with this class in the place of its."""
    two_gpus(devices)
    update_ranks([UPDATES[case] | {"large": True, "agent": str(fleet.store("a")), "seed": 7,
                                   "directory": str(tmp_path)}] * len(devices))


def test_the_buffers_memory_is_given_back(fleet, published):
    for _ in range(3):
        ce.serve_to(receive, "gpu", devices=["cuda:0"], agent=fleet.store("a"),
                    attach_timeout=PATIENCE_LONG_S)
    assert torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.memory_reserved(0) < 64 << 20  # the buffer was a gigabyte


def test_a_worker_that_dies_over_cuda_ipc(fleet, published):
    def request(handles):
        worker = Receiver(handles[0][1], "--fault", "kill", "--at", 1)
        assert worker.exit_code(PATIENCE_LONG_S) == -9

    with pytest.raises(ce.ReceiverLostError):
        ce.serve_to(request, "gpu", devices=["cuda:0"], agent=fleet.store("a"),
                    buffer_bytes=64 << 20, attach_timeout=PATIENCE_LONG_S)
    ce.serve_to(receive, "gpu", devices=["cuda:0"], agent=fleet.store("a"))


def test_a_parameter_server(fleet, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    tensors = {f"w.{index}": torch.randn(512, 512, device="cuda:0") for index in range(20)}
    server = ce.ParameterServer(rank=0, world_size=1, agent=fleet.store("a"))
    server.register_checkpoint("iteration-0", named_tensors=tensors)
    server.init_process_group()
    server.gather_metas("iteration-0")
    reports = []
    server.update("iteration-0", lambda handles: reports.extend(receive(handles)))
    assert not torch.distributed.is_initialized()
    server.unregister_checkpoint("iteration-0")
    [[report]] = reports
    assert report["tensors"] == {name: [str(tensor.dtype), list(tensor.shape), digest(tensor)]
                                 for name, tensor in tensors.items()}
    assert os.listdir(server._sockets.name) == []
