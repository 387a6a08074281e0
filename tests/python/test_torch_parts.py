"""The parts of DTensors, FSDP2 and FSDP1, of real ranks with gloo: together they are the whole
tensors, which torch gathers or which the model had before it was sharded."""
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch_parts import assembled, assert_same  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no gloo")


@pytest.fixture(scope="module", params=[4, 8])
def ranks(request, tmp_path_factory):
    """What each rank has found."""
    directory = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "sharded_ranks.py", str(request.param), directory],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(directory / f"{rank}.pt") for rank in range(request.param)]


def test_parts_of_all_ranks_are_the_whole_tensors(ranks):
    kinds = set()
    for case, (_, expected) in ranks[0].items():
        kinds.add(case.split()[0])
        parts = [part for rank in ranks for part in rank[case][0]]
        try:
            assert_same(assembled(parts), expected)
        except AssertionError as why:
            raise AssertionError(f"{case}: {why}") from why
    assert kinds >= {"placed", "fsdp2"} and kinds & {"fsdp1", "hybrid"}


def test_sharded_ranks_have_less_than_the_whole(ranks):
    """Otherwise the other tests pass with replicas, too."""
    for case in ranks[0]:
        if "NO_SHARD" in case or case.startswith("placed"):
            continue
        for rank in ranks:
            parts, expected = rank[case]
            mine = sum(part[-1].numel() for part in parts)
            assert mine < sum(tensor.numel() for tensor in expected.values()), case


def test_strided_shards_are_several_boxes(ranks):
    """Some rank has more than one box of a tensor, and some rank has none."""
    boxes = [sum(part[0] == name for part in parts) for rank in ranks
             for parts, expected in rank.values() for name in expected]
    assert max(boxes) > 1 and min(boxes) == 0
