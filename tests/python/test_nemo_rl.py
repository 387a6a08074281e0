"""The checkpoint engine for NeMo-RL, called as NeMo-RL calls it, from its sources of August 2026. Its
base class is NeMo-RL's own where NeMo-RL is installed, otherwise a small stand-in."""
import asyncio
import importlib.util
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")

import rekindle as rk  # noqa: E402

BACKEND = "rekindle.nemo_rl:CheckpointEngine"
TIMEOUT = 30.0


class Base:
    """Of NeMo-RL's abstract class."""

    shard_expert_weights = False

    def finalize(self):
        pass


def create(backend, *, bucket_size_bytes, engine_kwargs):
    module, name = backend.split(":")
    kind = getattr(importlib.import_module(module), name)
    return kind(bucket_size=bucket_size_bytes, **engine_kwargs)


@pytest.fixture(autouse=True)
def nemo_rl(monkeypatch):
    if importlib.util.find_spec("nemo_rl") is not None:
        return
    for name in ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines",
                 "nemo_rl.utils.checkpoint_engines.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    base = sys.modules["nemo_rl.utils.checkpoint_engines.base"]
    base.CheckpointEngine, base.create_checkpoint_engine = Base, create
    sys.modules["nemo_rl.utils.checkpoint_engines"].base = base
    for name in ("rekindle.nemo_rl", "rekindle.nemo_rl.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def made(rekindle, store, model, **options):
    from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine
    return create_checkpoint_engine(BACKEND, bucket_size_bytes=1 << 20, engine_kwargs={
        "model": model, "agent": str(rekindle.store(store)), "timeout": TIMEOUT, "device": "cpu",
        "coordinator": rekindle.coordinator, "release_after_refit": False, **options})


def meet(policy, generation):
    """What CheckpointEngineWeightSynchronizer does once."""
    metadata = [engine.prepare() for engine in (*policy, *generation)]
    sizes = {"train_world_size": len(policy), "rollout_world_size": len(generation),
             "metadata": metadata}
    for rank, engine in enumerate(policy):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
    for rank, engine in enumerate(generation):
        engine.init_rollout_process_group(rollout_rank=rank, **sizes)


def refit(policy, generation, weights):
    """Every worker in a thread. `weights`: of each policy rank. Returns what vLLM's workers got."""
    results = {}

    def run(key, call):
        try:
            results[key] = asyncio.run(call())
        except Exception as why:
            results[key] = why

    async def receive(engine):
        return {name: tensor.clone() async for batch in engine.receive_weight_batches()
                for name, tensor in batch}
    calls = {("send", rank): lambda engine=engine, rank=rank: engine.send_weights(weights(rank))
             for rank, engine in enumerate(policy)}
    calls.update({rank: lambda engine=engine: receive(engine)
                  for rank, engine in enumerate(generation)})
    threads = [threading.Thread(target=run, args=pair) for pair in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[rank] for rank in range(len(generation))]


def tensors(step):
    made_by = torch.Generator().manual_seed(step)
    return {"embed": torch.randn(31, 8, generator=made_by), "scalar": torch.tensor(float(step)),
            "steps": torch.arange(step, step + 3)}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("in_parts", ["auto", "spread"])
def test_each_refit_brings_the_weights_of_its_step(rekindle, in_parts):
    policy = [made(rekindle, store, f"nemo-{in_parts}", in_parts=in_parts) for store in "ab"]
    generation = [made(rekindle, store, f"nemo-{in_parts}") for store in "ab"]
    meet(policy, generation)
    for step in (1, 2, 3):
        for received in refit(policy, generation, lambda rank: iter(tensors(step).items())):
            assert same(received, tensors(step))
    before = policy[0]._turn.version
    meet(policy, generation)  # as after release_after_refit
    refit(policy, generation, lambda rank: iter(tensors(4).items()))
    assert policy[0]._turn.version > before


def test_policy_workers_publish_their_shards(rekindle):
    from rekindle.nemo_rl import ShardedWeights
    from rekindle.torch import parts_of

    def shards(rank):
        whole = tensors(5)["embed"]
        half = whole[:16] if rank == 0 else whole[16:]
        place = ((31, 8), (16 * rank, 0))
        return ShardedWeights(lambda: parts_of({"embed": half}, layout={"embed": place}), None)
    policy = [made(rekindle, store, "nemo-shards", in_parts="on", dtype="bfloat16")
              for store in "ab"]
    generation = [made(rekindle, "a", "nemo-shards")]
    meet(policy, generation)
    received, = refit(policy, generation, shards)
    assert same(received, {"embed": tensors(5)["embed"].to(torch.bfloat16)})


def test_a_refit_that_fails_does_not_put_the_workers_out_of_step(rekindle):
    policy, generation = [made(rekindle, "a", "nemo-fails")], [made(rekindle, "b", "nemo-fails")]
    meet(policy, generation)
    generation[0]._receiver._timeout = 0.5

    def broken(rank):
        yield from ()
        raise RuntimeError("a rank is gone")
    with pytest.raises((RuntimeError, TimeoutError)):
        refit(policy, generation, broken)
    generation[0]._receiver._timeout = TIMEOUT
    received, = refit(policy, generation, lambda rank: iter(tensors(6).items()))
    assert same(received, tensors(6))


def test_an_unknown_key_is_refused(rekindle):
    with pytest.raises(rk.InvalidError, match="'modle'"):
        made(rekindle, "a", "nemo", modle="x")
    policy = [made(rekindle, "a", "nemo", coordinator=None)]
    with pytest.raises(rk.InvalidError, match="keep=0"):
        meet(policy, [])
