"""Trainers of verl whose ranks publish their shards, with a small stand-in for verl, three real
ranks with gloo, and agents of two hosts."""
import pytest

torch = pytest.importorskip("torch")

from rekindle._engines.sharded_weights import share_of  # noqa: E402
from torch_parts import assert_same  # noqa: E402
from verl_parts import WORLD, published  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no gloo")


@pytest.fixture(scope="module")
def ran(fleet, tmp_path_factory):
    return published(fleet, "stand_in", tmp_path_factory.mktemp("verl"))


def of(ran, case):
    found, _ = ran
    return [found[f"{case} {step}"] for step in range(2)]


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "dtensors", "off", "gathered", "spread"])
def test_each_step_is_what_verl_would_gather(ran, case):
    for _, _, expected, tensors in of(ran, case):
        assert_same(tensors, expected)


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "dtensors"])
def test_shards_are_published_by_every_rank_and_not_gathered(ran, case):
    for said, gathered, _, _ in of(ran, case):
        assert said["rekindle/publishing_ranks"] == WORLD
        assert gathered == 0


def test_gathered_tensors_are_spread_over_the_ranks_on_request(ran):
    assert all(said["rekindle/publishing_ranks"] == WORLD for said, *_ in of(ran, "spread"))


def test_a_share_is_about_as_large_as_the_others():
    tensors = {f"t{index}": torch.zeros(index % 7 + 1) for index in range(40)}
    shares = [share_of(rank, 4, tensors.items()) for rank in range(4)]
    assert sorted(part.name for share in shares for part in share) == sorted(tensors)
    sizes = [sum(part.extent[0] for part in share) for share in shares]
    assert max(sizes) - min(sizes) <= 7


def test_gathered_tensors_are_published_by_the_first_rank_which_says_why_once(ran):
    for case in ("off", "gathered"):
        assert all(said["rekindle/publishing_ranks"] == 1 for said, *_ in of(ran, case))
    assert all(gathered for _, gathered, _, _ in of(ran, "off"))
    assert ran[1].count("the first rank publishes all weights") == 1


def test_packed_experts_become_one_tensor_each(ran):
    *_, tensors = of(ran, "fsdp2")[0]
    assert "model.mlp.experts.4.up_proj.weight" in tensors
    *_, tensors = of(ran, "dtensors")[0]  # of a generator, names stay
    assert "body.mlp.experts.gate_up_proj" in tensors
