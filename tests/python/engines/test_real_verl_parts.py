"""verl's own FSDP engine, whose ranks publish their shards: three ranks with gloo, two hosts."""
import pytest

from torch_parts import assert_same
from verl_parts import WORLD, published


@pytest.fixture(scope="module")
def ran(rekindle, tmp_path_factory):
    return published(rekindle, "verl", tmp_path_factory.mktemp("verl"))[0]


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "dtensors", "off", "gathered", "spread"])
def test_each_step_is_what_verl_gathers(ran, case):
    for step in range(2):
        said, _, expected, tensors = ran[f"{case} {step}"]
        assert_same(tensors, expected)
        first_only = case in ("off", "gathered")
        assert said["rekindle/publishing_ranks"] == (1 if first_only else WORLD)


def test_packed_experts_become_the_tensors_that_verl_makes_of_them(ran):
    *_, tensors = ran["fsdp2 0"]
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in tensors
