"""Tensor parallelism as transformers cuts it: its own sharding code, run on stand-ins and on the
real tensors.

No process group with other processes: torch's fake one tells transformers which rank it is.
"""
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sharding = pytest.importorskip("transformers.distributed.sharding_utils",
                               reason="this transformers does not shard by DTensor")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # noqa: E402

import rekindle as rk  # noqa: E402
from rekindle import recording  # noqa: E402
from transformers_models import build, config  # noqa: E402


@pytest.fixture(scope="module")
def agent(fleet, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        model = build("llama_untied")
        directory = fleet.directory / "llama"
        model.save_pretrained(directory)
        fleet.publish("llama@1", directory)
        yield fleet.store("a")


@pytest.fixture
def mesh(request):
    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield rank, size, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def shards_of(mesh, size):
    """Names of parameters, and what cuts out this rank's part of each; None: it has all of it."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config("llama_untied"))
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
    apply_tensor_parallelism(model, mesh, plan)
    cut = {name: sharding.DtensorShardOperation(parameter).shard_tensor
           for name, parameter in model.named_parameters() if hasattr(parameter, "placements")}
    assert len(cut) > 10
    return {name: cut.get(name, lambda tensor: tensor) for name, _ in model.named_parameters()}


RANKS = [(0, 2), (1, 2)]


@pytest.mark.parametrize("mesh", RANKS, indirect=True)
@pytest.mark.parametrize("device", [None, "double:0"])
def test_their_cuts_recorded_and_fetched(agent, mesh, device):
    rank, size, device_mesh = mesh
    cuts, state = shards_of(device_mesh, size), build("llama_untied").state_dict()
    wanted = {name: cut(state[name]) for name, cut in cuts.items()}
    targets = {name: torch.full_like(part, -7).contiguous() for name, part in wanted.items()}

    def load(tensors):
        for name, tensor in tensors:
            targets[name].copy_(cuts[name](tensor))
    with recording.attach(load, targets, {"tp": [rank, size]}, "llama", 1, agent=agent,
                          device=device) as session:
        session.commit(timeout=60)
        fetched = sum(info.nbytes for info in session.tensors())
    for name, part in wanted.items():
        assert torch.equal(targets[name], part), name
    assert fetched == sum(part.numel() * part.element_size() for part in wanted.values())


@pytest.mark.parametrize("mesh", RANKS, indirect=True)
def test_the_built_in_shard_agrees_where_both_cut(agent, mesh):
    """They leave embeddings whole, or cut them, as they like: compared are the layers."""
    rank, size, device_mesh = mesh
    cuts, state = shards_of(device_mesh, size), build("llama_untied").state_dict()
    compared = 0
    with rk.attach("llama", 1, shard=f"tp={rank}/{size}", agent=agent) as session:
        for name, tensor in session:
            if ".layers." in name:
                assert torch.equal(tensor, cuts[name](state[name])), name
                compared += tensor.shape != state[name].shape
    assert compared == 7 * 2
