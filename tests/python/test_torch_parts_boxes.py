"""Boxes by arithmetic alone, against lists of single elements: placements, flat ranges, plain
tensors with a layout. And what is refused."""
import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

import rekindle  # noqa: E402
from rekindle.torch import flat_boxes, flat_parts, parts_of  # noqa: E402
from rekindle.torch.placements import local_boxes  # noqa: E402
from torch_parts import assembled, assert_same, read  # noqa: E402


def cut(whole, mesh, coordinate, placements):
    """The local tensor as torch's own placements cut it, one after the other."""
    for size, index, placement in zip(mesh, coordinate, placements):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(whole, size, with_padding=False)
            whole = pieces[index]
    return whole


PLACEMENTS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2),
              _StridedShard(1, split_factor=3)]


@pytest.mark.parametrize("shape", [(12, 6), (7, 5), (1, 13), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("mesh", [(3, 2), (2, 2, 3)], ids=str)
def test_boxes_hold_the_elements_that_torch_puts_there(shape, mesh):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    several = 0
    for placements in itertools.product(PLACEMENTS, repeat=len(mesh)):
        for coordinate in itertools.product(*map(range, mesh)):
            local = cut(whole, mesh, coordinate, placements)
            if fsdp2_cuts_otherwise(placements, mesh, shape):
                continue
            boxes = local_boxes("w", shape, local.shape, mesh, coordinate, placements)
            seen = torch.zeros_like(local)
            for box in boxes:
                there = tuple(slice(a, a + n) for a, n in zip(box.offset, box.extent))
                here = tuple(slice(a, a + n) for a, n in zip(box.at, box.extent))
                assert torch.equal(whole[there], local[here]), (placements, coordinate, box)
                seen[here] += 1
            assert (seen == 1).all(), (placements, coordinate)
            several += len(boxes) > 1
    assert several


def fsdp2_cuts_otherwise(placements, mesh, shape):
    """Whether a strided shard has the split factor of FSDP2, and the shards are not even. FSDP2's
    real tensors, in test_torch_parts, show how it cuts."""
    for at, placement in enumerate(placements):
        later = [size for size, one in zip(mesh[at + 1:], placements[at + 1:])
                 if not one.is_replicate() and one.dim == getattr(placement, "dim", None)]
        if getattr(placement, "split_factor", 1) > 1 and later and (
                placement.split_factor == torch.Size(later).numel()):
            return True
    return False


def test_runs_that_are_neighbours_are_one_box():
    placements = [_StridedShard(0, split_factor=3)]
    assert local_boxes("w", (6,), (6,), (1,), (0,), placements) == [((0,), (6,), (0,))]


def test_even_shards_of_fsdp2_are_the_same_in_both_orders():
    whole = torch.arange(24)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    for coordinate in itertools.product(range(3), range(2)):
        local = cut(whole, (3, 2), coordinate, placements)
        (box,) = local_boxes("w", (24,), local.shape, (3, 2), coordinate, placements)
        assert torch.equal(whole[box.offset[0]:box.offset[0] + 4], local)


def test_uneven_shards_of_fsdp2_are_cut_by_tensor_parallelism_first():
    """Nine rows: TP has 5 and 4, and FSDP2 cuts each of them in four. The definition would give
    row 8 to (3, 0)."""
    placements, found = [_StridedShard(0, split_factor=2), Shard(0)], {}
    sizes = {(0, 0): 2, (1, 0): 2, (2, 0): 1, (3, 0): 0, (0, 1): 1, (1, 1): 1, (2, 1): 1, (3, 1): 1}
    for coordinate, size in sizes.items():
        for box in local_boxes("w", (9,), (size,), (4, 2), coordinate, placements):
            found[coordinate] = (*box.offset, *box.extent)
    assert found == {(0, 0): (0, 2), (1, 0): (2, 2), (2, 0): (4, 1), (0, 1): (5, 1), (1, 1): (6, 1),
                     (2, 1): (7, 1), (3, 1): (8, 1)}


def test_a_partial_placement_is_refused_with_what_to_do():
    with pytest.raises(rekindle.InvalidError, match=r"'w' is .*no rank has its values: call"):
        local_boxes("w", (4,), (4,), (2,), (0,), [Partial()])


def test_a_local_shape_that_the_placements_do_not_give_is_refused():
    with pytest.raises(rekindle.InvalidError, match=r"'w' has a local shape of \[3\].*give 4 in"):
        local_boxes("w", (8,), (3,), (2,), (0,), [Shard(0)])


@pytest.mark.parametrize("shape", [(), (1,), (6,), (3, 4), (2, 3, 4), (3, 1, 2, 2)], ids=str)
def test_flat_ranges_are_few_boxes_that_hold_exactly_their_elements(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    count = whole.numel()
    for start, stop in itertools.combinations_with_replacement(range(count + 1), 2):
        boxes, flat = flat_boxes(shape, start, stop), whole.flatten()
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        at = start
        for box in boxes:
            there = whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.extent))]
            assert box.start == at and torch.equal(there.flatten(), flat[at:at + there.numel()])
            at += there.numel()
        assert at == stop


def test_a_flat_range_outside_the_tensor_is_refused():
    with pytest.raises(rekindle.InvalidError, match=r"\[3, 7\) are not in a tensor of shape"):
        flat_boxes((2, 3), 3, 7)


def test_parts_of_flat_ranges_make_up_the_tensor():
    whole = torch.arange(60.0).view(3, 4, 5)
    parts = [part for start, stop in [(0, 7), (7, 7), (7, 33), (33, 60)]
             for part in flat_parts("w", (3, 4, 5), whole.flatten()[start:stop], start)]
    assert_same(assembled(read(parts_of(parts, names=[("w", "v")]))), {"v": whole})


def test_plain_tensors_are_whole_or_where_the_layout_says():
    whole = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(4), "s": torch.tensor(2.0)}
    parts = []
    for rank in range(2):
        mine = {"w": whole["w"][:, rank * 3:][:, :3], "b": whole["b"], "s": whole["s"]}

        def layout(name, tensor, rank=rank):
            return ((4, 6), (0, rank * 3)) if name == "w" else None
        found = parts_of(mine, layout=layout)
        assert found[0][:5] == ("w", "F32", (4, 6), (0, rank * 3), (4, 3))
        assert [part[:5] for part in parts_of(mine, layout={"w": ((4, 6), (0, rank * 3))})] == [
            part[:5] for part in found]
        parts += read(found)
    assert_same(assembled(parts), whole)


@pytest.mark.parametrize("place", [((4,), (3,)), ((4,), (-1,)), ((4, 4), (0, 0))], ids=str)
def test_a_place_where_the_tensor_does_not_fit_is_refused(place):
    with pytest.raises(rekindle.InvalidError, match=r"layout puts 'w', of shape \[2\], at .* fit"):
        parts_of({"w": torch.zeros(2)}, layout={"w": place})


def test_a_layout_for_a_tensor_that_is_not_there_is_refused():
    with pytest.raises(rekindle.InvalidError, match="layout has 'v', which the model has not"):
        parts_of({"w": torch.zeros(2)}, layout={"v": ((4,), (0,))})


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_parts_of_a_module_are_its_state_also_without_elements():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 0))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert_same(assembled([part for part in read(parts_of(model)) if 0 not in part[2]]), {
        name: value for name, value in model.state_dict().items() if value.numel()})
    assert [part.name for part in parts_of(model)] == list(model.state_dict())


def test_tied_parameters_are_parts_under_each_name():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False),
                                 "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert [part.name for part in parts_of(model)] == ["a.weight", "b.weight"]


@pytest.mark.parametrize(("tensor", "said"), [
    (torch.zeros(2, device="meta"), "'w' is on the meta device"),
    (torch.zeros(2, 2).to_sparse(), "'w' is not a dense tensor"),
    (torch.zeros(2, dtype=torch.complex64), "'w': torch.complex64 is not a dtype"),
    (b"state", "'w' is a bytes, not a torch tensor"),
], ids=["meta", "sparse", "complex", "bytes"])
def test_what_has_no_bytes_to_publish_is_refused_by_name(tensor, said):
    with pytest.raises(rekindle.InvalidError, match=said):
        parts_of({"w": tensor})


def test_another_source_is_refused():
    with pytest.raises(rekindle.InvalidError, match="publish a list. Give a module"):
        parts_of([torch.zeros(2)])
