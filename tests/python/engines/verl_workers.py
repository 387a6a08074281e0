"""Workers of verl's on Ray, of which only the models are missing: what trains is a function of the
step, what serves keeps what it was given."""
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout import BaseRollout, RolloutReplica


def weights(step):
    made = torch.Generator().manual_seed(step)
    return {"embed": torch.randn(31, 8, generator=made), "norm": torch.randn(8, generator=made),
            "steps": torch.tensor([step])}


class Trainer(Worker):
    """As verl's engine worker makes its checkpoint engine and sends."""

    def __init__(self, config):
        super().__init__()
        import_external_libs(config.custom_backend_module)
        self.engine = CheckpointEngineRegistry.new(
            config.backend, is_master=self.rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        assert mode == "rekindle"
        return await self.engine.send_weights(iter(weights(global_steps).items()),
                                              global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)


class ShardedTrainer(Trainer):
    """Several ranks with FSDP2, whose training engine gives shards."""

    def __init__(self, config):
        super().__init__(config)
        torch.distributed.init_process_group("gloo")
        self.module = sharded(2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        from rekindle.verl import ShardedWeights, fsdp_parts
        with torch.no_grad():
            self.module.weight.add_(1)

        def gathered():
            raise AssertionError("somebody gathers")
        return await self.engine.send_weights(
            ShardedWeights(lambda: fsdp_parts(self.module), gathered), global_steps=global_steps)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 31, bias=False)


def sharded(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    return fully_shard(linear(), mesh=init_device_mesh("cpu", (world,)))


class Keeps(BaseRollout):
    """In the place of an engine's adapter."""

    def __init__(self):
        self.received = {}

    async def resume(self, tags):
        raise NotImplementedError

    async def release(self):
        raise NotImplementedError

    async def update_weights(self, weights, wire_format="named_tensors", **more):
        assert wire_format == "named_tensors"
        self.received = {name: tensor.clone() async for name, tensor in weights}


class Rollout(CheckpointEngineWorker):
    """verl's worker, and what it has received."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self):
        return self.server_adapter.received


class Replica(RolloutReplica):
    """verl's replica of workers that are there, without HTTP servers."""

    async def launch_servers(self):
        raise NotImplementedError
