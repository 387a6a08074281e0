"""How much of a parameter was written: the union of what was, also where writes overlap."""
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rekindle._engines import coverage
from rekindle._engines.completeness import check_loaded, check_plan
from rekindle._engines.coverage import covered
from rekindle._engines.writes import WriteWatch
from rekindle.errors import InvalidError
from rekindle.recording.plan import Constant, Move, pack
from torch import nn

SEED = 20250811


def one_by_one(size, stride, regions):
    def elements(offset, counts, steps):
        found = [offset]
        for count, step in zip(counts, steps):
            found = [first + index * step for first in found for index in range(count)]
        return found
    written = {element for region in regions for element in elements(*region)}
    return sum(element in written for element in elements(0, size, stride))


def some_layout(rng):
    """Any order of dimensions; some with gaps, some that repeat elements."""
    size = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
    stride, step = [0] * len(size), 1
    for k in rng.sample(range(len(size)), len(size)):
        stride[k] = step
        step *= size[k] * rng.choice([1, 1, 1, 2])
    if size and rng.random() < 0.1:
        stride[rng.randrange(len(size))] = rng.choice([0, 1])
    return size, stride


def some_region(rng, size, stride):
    """A view of the tensor, or anything."""
    if rng.random() < 0.2:
        dims = [(rng.randint(0, 5), rng.randint(0, 9)) for _ in range(rng.randint(0, 3))]
        return (rng.randint(-20, 40), *([d[k] for d in dims] for k in (0, 1)))
    view = torch.empty(4000).as_strided(size, stride, 0)
    for _ in range(rng.randint(0, 3) if size else 0):
        k = rng.randrange(len(size))
        begin = rng.randint(0, view.shape[k])
        cut = slice(begin, rng.randint(begin, view.shape[k]), rng.choice([1, 1, 2]))
        view = view[(slice(None),) * k + (cut,)]
    return view.storage_offset(), tuple(view.shape), tuple(view.stride())


@pytest.mark.parametrize("block", [3, 7, 1 << 20])
def test_it_is_what_marking_elements_one_by_one_gives(monkeypatch, block):
    monkeypatch.setattr(coverage, "_BLOCK", block)
    rng = random.Random(SEED + block)
    for _ in range(1000):
        size, stride = some_layout(rng)
        regions = [some_region(rng, size, stride) for _ in range(rng.randint(0, 6))]
        assert covered(size, stride, regions) == one_by_one(size, stride, regions), (
            SEED, size, stride, regions)


@pytest.mark.parametrize("size, regions", [
    ((100_000, 4), [(4 * row, (4,), (1,)) for row in range(100_000)]),
    ((4, 20_000), [(column, (4,), (20_000,)) for column in range(20_000)]),
    ((8, 1 << 20, 512), [(expert * (1 << 29) + half, (1 << 20, 256), (512, 2))
                         for expert in range(8) for half in (0, 1)])],
    ids=["rows", "columns", "interleaved"])
def test_regions_that_are_apart_are_not_marked(monkeypatch, size, regions):
    """However many they are, or how large: the last one has four billion elements."""
    def never(*_):
        raise AssertionError("elements were marked")
    monkeypatch.setattr(coverage, "_marked", never)
    like = torch.empty(size, device="meta")
    assert covered(size, like.stride(), regions) == like.numel()
    assert covered(size, like.stride(), regions[1:]) < like.numel()


def test_what_overlaps_is_marked_where_it_does(monkeypatch):
    marked, mark = [], coverage._marked

    def noted(runs, own):
        marked.append((len(list(runs)), own.end - own.offset))
        return mark(runs, own)
    monkeypatch.setattr(coverage, "_marked", noted)
    columns = [(column, (4,), (100,)) for column in range(100)]
    assert covered((4, 100), (100, 1), [*columns, (7, (2,), (200,))]) == 400
    assert marked == [(2, 301)]


# --- what a loader writes


def move(parameter, view, name="w"):
    """Of as many elements of a tensor as the view has."""
    count = view.numel()
    steps = torch.empty(view.shape, device="meta").stride()
    return Move(name, (0,), (count,), 0, steps, parameter, view.storage_offset(),
                tuple(view.shape), tuple(view.stride()), "float32")


def model_of(*shape):
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(shape), requires_grad=False)
    return model


def twice(p):
    return [p[:3], p[1:3]]  # 5 rows of 4, and the last one is missing


def padding_twice(p):
    return [p[:2], p[2:, :1], p[2:, :2], p[:1]]


def by_columns(p):
    return [p[:, :2], p[:, 1:3], p[0]]


def whole(p):
    return [p[:3], p[:3], p[2:], p.t()[1:]]


LOADS = [(twice, 12), (padding_twice, 12), (by_columns, 13), (whole, 16)]


@pytest.mark.parametrize("views, count", LOADS)
def test_an_overlap_in_a_plan_does_not_hide_a_gap(views, count):
    model = model_of(4, 4)
    plan = pack([move("p", view) for view in views(model.p.data)], (), ())
    if count == 16:
        check_plan(model, plan, None, ())
        return
    with pytest.raises(InvalidError, match=rf"p \({count} of 16 elements written\)"):
        check_plan(model, plan, None, ())


@pytest.mark.parametrize("views, count", LOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_an_overlap_of_what_a_loader_was_seen_to_write_does_not_hide_a_gap(views, count, dtype):
    """By views of another dtype, too."""
    model = model_of(4, 4)
    with WriteWatch(model) as watch:
        for view in views(model.p.data):
            if dtype is torch.float32 or view.is_contiguous():
                view.view(dtype).fill_(1)
            else:
                view.copy_(torch.ones(view.shape))
    if count == 16:
        check_loaded(model, watch.regions(), ())
        return
    with pytest.raises(InvalidError, match=rf"p \({count} of 16 elements written\)"):
        check_loaded(model, watch.regions(), ())


def test_constants_moves_and_what_was_seen_count_together_and_once():
    model = model_of(4, 4)
    p = model.p.data
    plan = pack([move("p", p[:2])], (), ["opaque"], [Constant("p", 4, (4,), (1,), 0.0)])
    with WriteWatch(model) as watch:
        p[2:3].fill_(1)
        p[1:2].fill_(1)
    with pytest.raises(InvalidError, match=r"p \(12 of 16 elements written\)"):
        check_plan(model, plan, watch.regions(), ())
    with WriteWatch(model) as watch:
        p[2:].fill_(1)
    check_plan(model, plan, watch.regions(), ())


def test_parameters_of_one_memory_are_counted_each_by_itself():
    memory = torch.zeros(24)
    model = nn.Module()
    for name, part in (("a", memory[:8]), ("b", memory[8:16].view(2, 4).t()),
                       ("c", memory[16::2]), ("d", memory[:1].expand(3))):
        model.register_parameter(name, nn.Parameter(part, requires_grad=False))
    with WriteWatch(model) as watch:
        memory[4:20].fill_(1)
    with pytest.raises(InvalidError) as why:
        check_loaded(model, watch.regions(), ())
    assert all(said in str(why.value) for said in (
        "a (4 of 8 elements written)", "c (2 of 4 elements written)", "d (nothing written)"))
    assert "b (" not in str(why.value)
    with WriteWatch(model) as watch:
        memory[:1].fill_(1)
        memory[1:].fill_(1)
    check_loaded(model, watch.regions(), ())


def test_turning_a_view_is_not_writing_to_it():
    model = model_of(4, 4)
    with WriteWatch(model) as watch:
        model.p.data.t_()
        model.p.data.unsqueeze_(0)
    with pytest.raises(InvalidError, match=r"p \(nothing written\)"):
        check_loaded(model, watch.regions(), ())


def test_what_a_loader_writes_is_seen_in_its_threads_too():
    """As DeepSeek's: tensors in host memory are copied by a pool."""
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(4, 2), requires_grad=False)
                              for name in ("whole", "part", "other", "none")})
    submit = ThreadPoolExecutor.submit
    with WriteWatch(model) as watch, ThreadPoolExecutor() as pool:
        done = pool.submit(lambda: (model["whole"].data[:3].copy_(torch.ones(3, 2)),
                                    model["whole"].data[3:].fill_(0)))
        model["part"].data[1:].copy_(torch.ones(3, 2))
        model["part"].data[1:].copy_(torch.zeros(3, 2))
        model["other"].data = torch.ones(4, 2)
        done.result()
    with pytest.raises(InvalidError, match=(
            r"weights: none \(nothing written\), part \(6 of 8 elements written\);")):
        check_loaded(model, watch.regions(), ())
    assert ThreadPoolExecutor.submit is submit
