"""Ranks of a trainer with gloo, for test_torch_parts.py: python sharded_ranks.py WORLD DIRECTORY.

Each rank writes, for each case, its parts with their elements, and what torch says the whole
tensors are.
"""
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy,
                                    ShardingStrategy, StateDictType, fully_shard)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                               parallelize_module)
from torch.distributed.tensor.placement_types import _StridedShard

import forked_ranks
from rekindle.torch import parts_of

SHAPES = [(8, 16), (7, 5), (5, 3, 2), (1, 9), (13,)]
MESHES = {4: [(2, 2)], 8: [(4, 2), (2, 4)]}


class Block(nn.Module):
    """Sizes that no number of ranks divides, and a buffer of each kind."""

    def __init__(self, wide=17):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, wide)
        self.down = nn.Linear(wide, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([3.0]))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        return self.head(x + self.down(self.up(x).relu()) * self.scale)


class Mlp(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up = nn.Linear(8, wide)
        self.down = nn.Linear(wide, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def whole(state):
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in state.items()}


def read(source):
    return [(*part[:-1], part.read().clone()) for part in parts_of(source)]


def train(model, *inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(*inputs).float().pow(2).mean().backward()
    optimizer.step()


def placements(mesh):
    """Every pair that distribute_tensor makes by its own definition."""
    last = mesh[1]
    plain = [Replicate(), Shard(0), Shard(1)]
    pairs = [(one, other) for one in plain for other in plain]
    return pairs + [(_StridedShard(0, split_factor=last), Shard(0)),
                    (_StridedShard(0, split_factor=last), Replicate()),
                    (_StridedShard(0, split_factor=3), Shard(1)),
                    (Shard(0), _StridedShard(0, split_factor=2)),
                    (_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=3))]


def placed(name, mesh):
    """A DTensor of each shape under each pair of placements."""
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
    state, expected = {}, {}
    for shape in SHAPES:
        tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for pair in placements(mesh):
            if any(one.dim >= len(shape) for one in pair if not one.is_replicate()):
                continue
            # FSDP2's pair: for uneven shards, FSDP2 cuts in another way than distribute_tensor.
            if pair[0] == _StridedShard(0, split_factor=mesh[1]) and pair[1] == Shard(0) and (
                    shape[0] % (mesh[0] * mesh[1])):
                continue
            key = f"{shape} {pair}"
            # Every rank cuts its own copy: scattering fails for some uneven shards.
            state[key] = distribute_tensor(tensor, device_mesh, pair, src_data_rank=None)
            expected[key] = tensor
    gathered = whole(state)
    assert all(torch.equal(gathered[key], expected[key]) for key in state), "no oracle"
    yield name, read(state), gathered


def subset():
    """Some ranks are not in the mesh of the tensor."""
    mesh = DeviceMesh("cpu", [1, 2])
    tensor = torch.arange(10.0).view(5, 2)
    state = {"w": distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)}
    yield "placed on a subset", read(state), {"w": tensor}


def tensor_parallel(wide, mesh):
    model = Mlp(wide)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, before


def fsdp2(mesh):
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
    for wide in (mesh[0] * mesh[1] * 2, 9, 11, 3):
        torch.manual_seed(1)
        model, before = tensor_parallel(wide, device_mesh)
        fully_shard(model, mesh=device_mesh["dp"])
        # In torch 2.15, full_tensor() fails or hangs for some of the uneven shards. The weights
        # before sharding are the oracle.
        yield f"fsdp2 tp {wide}", read(model), before
        if wide == mesh[0] * mesh[1] * 2:
            train(model, torch.ones(2, 8))
            yield f"fsdp2 tp {wide} trained", read(model), whole(model.state_dict())


def fsdp2_alone(world):
    mesh = init_device_mesh("cpu", (world,))
    for mixed in (False, True):
        torch.manual_seed(2)
        model = Block()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None)
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(model, FSDPModule)
        tokens = torch.arange(5)[None]
        model(tokens)  # leaves the root's parameters unsharded
        yield f"fsdp2 forward {mixed}", read(model), whole(model.state_dict())
        train(model, tokens)
        yield f"fsdp2 trained {mixed}", read(model), whole(model.state_dict())
    model = nn.Linear(8 * world, 5, bias=False)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    yield "fsdp2 columns", read(model), whole(model.state_dict())


def hybrid():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "dp", "tp"))
    torch.manual_seed(3)
    model, before = tensor_parallel(9, mesh)
    fully_shard(model, mesh=mesh["replicas", "dp"])
    yield "hybrid", read(model), before


def fsdp1():
    tokens = torch.arange(5)[None]
    for original in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            torch.manual_seed(4)
            inner = Block()
            options = {"use_orig_params": original, "sharding_strategy": strategy,
                       "device_id": torch.device("cpu")}
            inner.up = FullyShardedDataParallel(inner.up, **options)
            model = FullyShardedDataParallel(inner, **options)
            name = f"fsdp1 {original} {strategy.name}"
            yield name, read(model), full_state(model)
            train(model, tokens)
            yield f"{name} trained", read(model), full_state(model)


def full_state(model):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def cases(world):
    for mesh in MESHES[world]:
        yield from placed(f"placed {mesh}", mesh)
        for name, parts, expected in fsdp2(mesh):
            yield f"{name} {mesh}", parts, expected
    yield from fsdp2_alone(world)
    if world == 4:
        yield from subset()
        yield from fsdp1()
    else:
        yield from hybrid()


def main(world, directory):
    def rank_main(rank):
        found = {name: (parts, expected) for name, parts, expected in cases(world)}
        torch.save(found, f"{directory}/{rank}.pt")
    return forked_ranks.run(world, directory, rank_main)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
