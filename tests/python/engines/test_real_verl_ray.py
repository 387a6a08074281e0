"""verl's own manager and workers, each a process of Ray's, with Rekindle as their backend."""
import os
import pathlib

import pytest
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from .verl_workers import Keeps, Replica, Rollout, ShardedTrainer, Trainer, linear, weights

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def local_ray(rekindle):
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    names = ("REKINDLE_BINARY", "REKINDLE_LIBRARY")
    ray.init(num_cpus=8, num_gpus=0, include_dashboard=False, runtime_env={"env_vars": {
        "PYTHONPATH": path, **{name: os.environ[name] for name in names}}})
    yield
    ray.shutdown()


def group(kind, size, **arguments):
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(kind), **arguments)
    return RayWorkerGroup(pool, made, use_gpu=False, device_name="cpu")


def made(rekindle, model, trainer, trainers):
    """Returns verl's manager, two replicas of one rollout worker each, and these workers."""
    config = CheckpointEngineConfig(
        backend="rekindle", custom_backend_module="rekindle.verl",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"rekindle": {"model": model, "agent": str(rekindle.store("a")),
                                    "coordinator": rekindle.coordinator, "device": "cpu"}})
    rollout_config = RolloutConfig(name="vllm", tensor_model_parallel_size=1,
                                   checkpoint_engine=config)
    rollouts = group(Rollout, 2, rollout_config=rollout_config, model_config=None,
                     server_adapter=Keeps())
    replicas = []
    for rank in range(2):
        replica = Replica(rank, rollout_config, None, gpus_per_node=1)
        replica.workers = [rollouts.workers[rank]]
        replicas.append(replica)
    manager = CheckpointEngineManager(config, group(trainer, trainers, config=config), replicas)
    return manager, replicas, rollouts


def test_verls_manager_moves_weights_from_a_trainer_to_two_rollout_workers(rekindle, local_ray):
    manager, replicas, rollouts = made(rekindle, "policy", Trainer, 1)
    for step in (1, 2, 3):  # gathered, then streamed
        if step == 3:  # one is lost, which concerns nobody else
            manager.remove_replicas(replicas[:1])
        said = manager.update_weights(global_steps=step)
        assert said["rekindle/publish_s"] > 0
        expected = {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                    for name, tensor in weights(step).items()}
        for received in rollouts.received()[0 if step < 3 else 1:]:
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], expected[name]) for name in expected)
    assert rollouts.received()[0]["steps"].item() == 2


def test_every_trainer_of_verls_manager_publishes_its_shards(rekindle, local_ray):
    manager, _, rollouts = made(rekindle, "sharded", ShardedTrainer, 2)
    for step in (1, 2):
        said = manager.update_weights(global_steps=step)
        assert said["rekindle/publishing_ranks"] == 2
        expected = (linear().weight.detach() + 1 + (step - 1)).to(torch.bfloat16)
        for received in rollouts.received():
            assert received.keys() == {"weight"}
            assert torch.equal(received["weight"], expected)
