"""The checkpoint engine in verl's real registry, called in the order in which its manager does."""
import asyncio
import threading
import time

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

import rekindle as rk

BUCKET = 1 << 20
TIMEOUT = 30.0


def engine(rekindle, node="a", **more):
    """As verl's workers make it: `custom_backend_module`, then the registry."""
    import_external_libs("rekindle.verl")
    return CheckpointEngineRegistry.new(
        "rekindle", bucket_size=BUCKET, model="policy", timeout=TIMEOUT,
        agent=str(rekindle.store(node)), **{"coordinator": rekindle.coordinator, **more})


def weights(seed, names=("a", "b.weight", "scalar", "empty", "steps")):
    made = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b.weight": (64, 3), "scalar": (), "empty": (0, 4)}
    every = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    every["steps"] = torch.arange(seed, seed + 3)  # is not converted
    return {name: every[name] for name in names}


def converted(tensors):
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t
            for name, t in tensors.items()}


async def collect(pairs):
    return {name: tensor.clone() async for name, tensor in pairs}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


def meet(trainers, rollouts):
    metadata = [worker.prepare() for worker in (*trainers, *rollouts)]
    kind = CheckpointEngineRegistry.get("rekindle")
    for group, arguments in zip((trainers, rollouts), kind.build_topology(
            len(trainers), len(rollouts), metadata)):
        assert all(len(values) == len(group) for values in arguments.values())
        for rank, worker in enumerate(group):
            worker.init_process_group(**{key: values[rank] for key, values in arguments.items()})


def update(trainers, rollouts, tensors):
    """Returns what each rollout worker received; each in a thread, as they are processes."""
    meet(trainers, rollouts)
    received = {}

    def receive(index):
        received[index] = asyncio.run(collect(rollouts[index].receive_weights(global_steps=1)))

    threads = [threading.Thread(target=receive, args=(index,)) for index in range(len(rollouts))]
    for thread in threads:
        thread.start()
    said = [asyncio.run(worker.send_weights(iter(tensors.items()), global_steps=1))
            for worker in reversed(trainers)]
    for thread in threads:
        thread.join()
    for worker in (*trainers, *rollouts):
        worker.finalize()
    assert said[-1]["rekindle/publish_s"] > 0 and said[0] == ({} if len(trainers) > 1 else said[0])
    return [received[index] for index in range(len(rollouts))]


def has(rekindle, version):
    try:
        with rk.attach("policy", version, agent=rekindle.store("a"), timeout=1.0) as session:
            return session.version == version
    except (rk.NotFoundError, rk.StaleError, rk.UnavailableError, TimeoutError):
        return False


@pytest.mark.parametrize("device", ["cpu", "double:0"])
def test_every_rollout_worker_receives_what_the_trainer_sends(rekindle, device):
    trainers = [engine(rekindle, is_master=True), engine(rekindle)]
    rollouts = [engine(rekindle, "a", device=device), engine(rekindle, "b", device=device)]
    for seed in (1, 2):  # gathered, then streamed
        for received in update(trainers, rollouts, weights(seed)):
            assert same(received, converted(weights(seed)))


def test_a_step_with_other_tensors_than_the_one_before_is_sent_whole(rekindle):
    trainer, rollout = engine(rekindle, is_master=True), engine(rekindle, device="cpu")
    for names in (("a", "b.weight", "steps"), ("a", "scalar", "steps"), ("a", "scalar"),
                  ("a", "scalar", "empty")):
        received, = update([trainer], [rollout], weights(3, names))
        assert same(received, converted(weights(3, names)))


def test_a_worker_that_comes_back_has_the_newest_weights_without_the_trainer(rekindle):
    trainer, rollout = engine(rekindle, is_master=True), engine(rekindle, device="cpu")
    update([trainer], [rollout], weights(4))
    del trainer, rollout
    received = asyncio.run(collect(engine(rekindle, "b", device="cpu").get_weights()))
    assert same(received, converted(weights(4)))


def test_versions_that_are_too_old_leave_the_fleet(rekindle):
    trainer = engine(rekindle, is_master=True, keep=1)
    update([trainer], [], weights(5))
    first = trainer._turn.version
    update([trainer], [], weights(6))
    deadline = time.monotonic() + TIMEOUT
    while has(rekindle, first):  # the coordinator's word takes a while to get to the agents
        assert time.monotonic() < deadline, "it has not left"
    with rk.attach("policy", trainer._turn.version, agent=rekindle.store("a")) as session:
        assert session.version == trainer._turn.version


def test_what_does_not_come_is_an_error_in_time_and_a_failed_step_leaves_nothing(rekindle):
    trainer, rollout = engine(rekindle, is_master=True), engine(rekindle, device="cpu")
    rollout._receiver._timeout = 0.5
    update([trainer], [], weights(7))

    def broken():
        yield "a", weights(7)["a"]
        raise RuntimeError("a rank is gone")

    meet([trainer], [rollout])
    with pytest.raises(RuntimeError, match="a rank is gone"):
        asyncio.run(trainer.send_weights(broken()))
    with pytest.raises(TimeoutError, match=f"policy@{trainer._turn.version} has not come"):
        asyncio.run(collect(rollout.receive_weights()))


def test_an_unknown_key_of_engine_kwargs_is_refused(rekindle):
    with pytest.raises(rk.InvalidError, match="'modle'"):
        engine(rekindle, modle="policy")
    with pytest.raises(rk.InvalidError, match="keep=0"):
        engine(rekindle, is_master=True, coordinator=None)
