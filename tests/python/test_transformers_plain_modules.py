"""rekindle.torch.load into plain modules."""
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import rekindle as rk  # noqa: E402
import rekindle.torch  # noqa: E402


class Tied(nn.Module):
    """One weight by two names, a buffer that is saved, one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)) * self.scale)


def original():
    torch.manual_seed(3)
    model = Tied()
    model.norm.running_mean.uniform_()
    model.norm.num_batches_tracked.fill_(11)
    return model.eval()


TOKENS = torch.arange(8)


@pytest.fixture(scope="module")
def agent(fleet):
    state = original().state_dict()
    rk.publish(state, "both@1", agent=fleet.store("a"))
    for kept in ("embed.weight", "head.weight"):
        other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}[kept]
        rk.publish({k: v for k, v in state.items() if k != other}, f"only-{kept}@1",
                   agent=fleet.store("a"))
    rk.publish({k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in state.items()},
               "half@1", agent=fleet.store("a"))
    state.pop("norm.bias")
    rk.publish(state, "gap@1", agent=fleet.store("a"))
    return fleet.store("a")


@pytest.mark.parametrize("device", [None, "double:0"])
@pytest.mark.parametrize("version", ["both", "only-embed.weight", "only-head.weight"])
def test_tied_weights_and_buffers(agent, version, device):
    model = Tied().eval()
    weight = model.embed.weight
    with rekindle.torch.load(model, version, agent=agent, device=device) as session:
        session.commit(timeout=60)
    assert model.embed.weight is weight is model.head.weight
    assert model.norm.num_batches_tracked.item() == 11
    assert torch.equal(model(TOKENS), original()(TOKENS))


def test_parameters_on_meta_get_memory_and_stay_tied(agent):
    with torch.device("meta"):
        model = Tied().eval()
    model.scale = Tied().scale
    rekindle.torch.load(model, "both", agent=agent).close()
    assert model.embed.weight is model.head.weight
    assert torch.equal(model(TOKENS), original()(TOKENS))


def test_a_buffer_that_nobody_has_values_of(agent):
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(rk.InvalidError, match="scale is not saved"):
        rekindle.torch.load(model, "both", agent=agent)
    assert model.embed.weight.is_meta


def test_another_dtype_only_when_asked(agent):
    model = Tied().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(rk.InvalidError, match="convert=True"):
        rekindle.torch.load(model, "half", agent=agent)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    rekindle.torch.load(model, "half", agent=agent, convert=True).close()
    for name, value in model.state_dict().items():
        wanted = original().state_dict()[name]
        if wanted.is_floating_point():
            wanted = wanted.to(torch.bfloat16).to(wanted.dtype)
        assert torch.equal(value, wanted), name


def test_a_gap(agent):
    model = Tied().eval()
    with pytest.raises(rk.NotFoundError, match=r"gap@1 has nothing for norm.bias of"):
        rekindle.torch.load(model, "gap", agent=agent)
    with torch.no_grad():
        model.norm.bias.fill_(9)
    rekindle.torch.load(model, "gap", agent=agent, strict=False).close()
    assert torch.equal(model.norm.bias, torch.full((4,), 9.0))
    assert torch.equal(model.embed.weight, original().embed.weight)


def test_another_shape(agent):
    model = Tied()
    model.norm = nn.BatchNorm1d(5)
    with pytest.raises(rk.InvalidError, match="norm.weight has shape"):
        rekindle.torch.load(model, "both", agent=agent)


def test_a_tied_weight_of_two_tensors_is_what_load_state_dict_makes_of_it(agent):
    state = original().state_dict()
    state["head.weight"] = state["embed.weight"] + 1
    rk.publish(state, "untied@1", agent=agent)
    theirs, model = Tied(), Tied()
    theirs.load_state_dict(state)
    rekindle.torch.load(model, "untied", agent=agent).close()
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, theirs.embed.weight)
