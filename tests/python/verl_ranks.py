"""Trainer ranks of verl with gloo: python verl_ranks.py verl|stand_in DIRECTORY COORDINATOR STORE...

There is one rank for each STORE, of the agent of its host. For each case, rank 0 saves the versions
that were published and the tensors that verl itself gathers.
"""
import asyncio
import os
import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (FullyShardedDataParallel, ShardedStateDictConfig, StateDictType,
                                    fully_shard)

import forked_ranks
import verl_stand_in

TIMEOUT = 60.0


class StandIn:
    """Trains a small model."""

    def prepare(self):
        verl_stand_in.install()
        from rekindle.verl import training
        self.engine = training.ShardedFSDPEngine
        assert verl_stand_in.EngineRegistry.made[
            "language_model", "fsdp2", "cuda", "rekindle"] is self.engine

    def model(self):
        torch.manual_seed(0)
        return verl_stand_in.Model()

    def parts_of_model(self, model):
        return [model.body["mlp"]["experts"], model]

    def training(self, model):
        return self.engine(model, "qwen3_moe")

    def train(self, model, optimizer):
        model(torch.arange(5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def gathered(self, training):
        """The generator of verl's class gathers."""
        return dict(verl_stand_in.FSDPEngineWithLMHead.get_per_tensor_param(training)[0])

    def count(self, training):
        return training.gathered


class Verl:
    """Trains a small Qwen3-MoE of transformers. verl's engine is not initialized, because that
    needs a GPU: it gets the module, and runs its own export."""

    def prepare(self):
        os.environ.update(VERL_ENGINE_DEVICE="cuda", VERL_ENGINE_VENDOR="rekindle")
        from verl.utils.import_utils import import_external_libs
        from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
        from verl.workers.engine.fsdp import transformer_impl
        import_external_libs("rekindle.verl.training")
        self.base = FSDPEngineWithLMHead
        self.engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        assert self.engine.__module__ == "rekindle.verl.training"
        # These three need a GPU.
        transformer_impl.get_device_id = lambda: "cpu"
        transformer_impl.load_fsdp_model_to_gpu = lambda module: None
        transformer_impl.log_gpu_memory_usage = lambda *_, **__: None

    def model(self):
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        torch.manual_seed(0)
        self.config = Qwen3MoeConfig(
            vocab_size=67, hidden_size=24, intermediate_size=20, moe_intermediate_size=9,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=12,
            num_experts=5, num_experts_per_tok=2, tie_word_embeddings=False)
        return Qwen3MoeForCausalLM(self.config)

    def parts_of_model(self, model):
        return [*model.model.layers, model]

    def training(self, model):
        engine = object.__new__(self.engine)
        engine.module = model
        engine.model_config = types.SimpleNamespace(hf_config=self.config, lora={})
        engine._is_offload_param = engine._uses_fsdp2_cpu_offload_policy = False
        engine._qat_enabled = False
        return engine

    def train(self, model, optimizer):
        # Kernels of experts do not all run on a CPU. The weights change without a forward pass.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    def gathered(self, training):
        weights, _ = self.base.get_per_tensor_param(training)
        return {name: tensor.clone() for name, tensor in weights}

    def count(self, training):
        return 0


def bf16(tensors):
    return {name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()}


def fsdp2(kind, model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in kind.parts_of_model(model):
        fully_shard(part, mesh=mesh)
    return model


def fsdp1(kind, model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped = FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(
        wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    return wrapped


def is_plain(item):
    return not hasattr(item[1], "placements")


def cases(kind):
    """Yields name, training engine, module, the weights to send, and options of the checkpoint
    engine."""
    yield "fsdp2", fsdp2, lambda training: training.get_per_tensor_param()[0], {"in_parts": "on"}
    yield "off", fsdp2, lambda training: training.get_per_tensor_param()[0], {"in_parts": "off"}
    yield "fsdp1", fsdp1, lambda training: training.get_per_tensor_param()[0], {}
    yield ("dtensors", fsdp2,
           lambda training: iter(sorted(training.module.state_dict().items(), key=is_plain)), {})
    for name, options in (("gathered", {}), ("spread", {"in_parts": "spread"})):
        yield name, fsdp2, lambda training: iter(kind.gathered(training).items()), options


def send(engine, weights):
    """What verl's manager does with the trainers."""
    metadata = [None] * dist.get_world_size()
    dist.all_gather_object(metadata, engine.prepare())
    trainers, _ = type(engine).build_topology(len(metadata), 0, metadata)
    engine.init_process_group(**{key: of[dist.get_rank()] for key, of in trainers.items()})
    said = asyncio.run(engine.send_weights(weights()))
    dist.barrier()
    engine.finalize()
    return said


def rank_main(rank, kind, directory, coordinator, store):
    kind.prepare()
    from rekindle.verl import RekindleCheckpointEngine
    found = {}
    for name, shard, weights, options in cases(kind):
        engine = RekindleCheckpointEngine(
            1 << 20, name, is_master=rank == 0, agent=store, coordinator=coordinator,
            timeout=TIMEOUT, **options)
        module = shard(kind, kind.model())
        training = kind.training(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(2):
            kind.train(module, optimizer)
            before = kind.count(training)
            said = send(engine, lambda: weights(training))
            gathered = kind.count(training) - before
            expected = (module.state_dict() if name == "dtensors" else kind.gathered(training))
            expected = {key: one.full_tensor() if hasattr(one, "full_tensor") else one.clone()
                        for key, one in expected.items()}
            found[f"{name} {step}"] = (engine._turn.version, said, gathered, bf16(expected))
    if rank == 0:
        torch.save(found, f"{directory}/found.pt")


if __name__ == "__main__":
    which, directory, coordinator, *stores = sys.argv[1:]
    kind = {"verl": Verl, "stand_in": StandIn}[which]()
    sys.exit(forked_ranks.run(len(stores), directory, lambda rank: rank_main(
        rank, kind, directory, coordinator, stores[rank])))
