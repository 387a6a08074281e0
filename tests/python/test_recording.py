"""The recorder against the same operations on real tensors: whatever a loader does, the plan gives
its bytes.
"""
import random

import pytest
import torch
from recording_fakes import catalog_of, check
from rekindle import recording


def numbered(*shape, dtype=torch.float32):
    """Every element different, so that no wrong slice looks right."""
    count = int(torch.Size(shape).numel())
    return torch.arange(count, dtype=torch.int64).to(dtype).reshape(shape) + 1


def single(operation, shape, into, source, *, param_dtype=None):
    """A loader that copies operation(tensor) to into(parameter)."""
    def make():
        parameter = torch.empty(shape, dtype=param_dtype or source.dtype)

        def load(tensors):
            for _, tensor in tensors:
                into(parameter).copy_(operation(tensor))
        return load, {"p": parameter}
    return make


VIEWS = {
    "narrow": (lambda t: t.narrow(1, 2, 3), (8, 3), 96),
    "negative narrow": (lambda t: t.narrow(0, -2, 2), (2, 6), 48),
    "select": (lambda t: t.select(0, 3), (6,), 24),
    "index": (lambda t: t[-1], (6,), 24),
    "slices": (lambda t: t[2:6, ..., 1:5], (4, 4), 64),
    "steps": (lambda t: t[1::3, ::2], (3, 3), 140),
    "new axis": (lambda t: t[None, 2], (1, 6), 24),
    "chunk": (lambda t: t.chunk(4)[2], (2, 6), 48),
    "split": (lambda t: t.split([1, 5, 2])[1], (5, 6), 120),
    "tensor_split": (lambda t: t.tensor_split(3)[0], (3, 6), 72),
    "unbind": (lambda t: t.unbind(1)[4], (8,), 32),
    "t": (lambda t: t.t()[1:3], (2, 8), 64),
    "movedim": (lambda t: t.movedim(1, 0)[:, 4:], (6, 4), 96),
    "permute": (lambda t: t.reshape(2, 4, 6).permute(2, 0, 1)[5], (2, 4), 32),
    "mT": (lambda t: t.mT, (6, 8), 192),
    "view": (lambda t: t.view(4, 12)[1], (12,), 48),
    "flat run": (lambda t: t.flatten()[7:29], (22,), 96),
    "unflatten": (lambda t: t.unflatten(0, (4, 2))[:, 1], (4, 6), 168),
    "squeeze": (lambda t: t[3:4].squeeze(0).unsqueeze(-1), (6, 1), 24),
    "expand": (lambda t: t[2].expand(3, 6), (3, 6), 24),
    "as_strided": (lambda t: t.as_strided((3, 2), (7, 2), 4), (3, 2), 96),
    "clone": (lambda t: t.narrow(0, 2, 2).clone(), (2, 6), 48),
    "contiguous": (lambda t: t.t().contiguous()[2:4], (2, 8), 64),
    "reshape that copies": (lambda t: t.t().reshape(12, 4)[:6], (6, 4), 96),
    "to": (lambda t: t.to("cpu", torch.float32)[5].detach().data, (6,), 24),
    "cat": (lambda t: torch.cat([t[6:], t[:2]]), (4, 6), 96),
    "cat, then a part": (lambda t: torch.cat([t[6:], t[:2]], 1)[:, 4:8], (2, 4), 32),
    "stack": (lambda t: torch.stack([t[6], t[1]], 1), (6, 2), 48),
    "stack, merged": (lambda t: torch.stack([t[:2], t[4:6]], 1).reshape(4, 6), (4, 6), 96),
    "empty_like": (lambda t: _filled(torch.empty_like(t), t), (8, 6), 192),
}


def _filled(buffer, tensor):
    buffer[:3] = tensor[5:]
    buffer[3:].copy_(tensor[:5])
    return buffer


@pytest.mark.parametrize("name", VIEWS)
def test_a_followed_operation_fetches_its_box_and_no_more(name):
    operation, shape, most_bytes = VIEWS[name]
    tensor = numbered(8, 6)
    plan, fetched = check(single(operation, shape, lambda p: p, tensor), {"w": tensor})
    assert plan.opaque == ()
    assert fetched <= most_bytes


UNKNOWN = {
    "arithmetic": lambda t: t[:2] * 2,
    "in place": lambda t: t.add_(1)[:2],
    "item": lambda t: t[:2] if t[0, 0].item() else t[2:4],
    "tolist": lambda t: torch.tensor(t.tolist())[:2],
    "numpy": lambda t: torch.from_numpy(t.numpy()[:2]),
    "truth": lambda t: t[:2] if t.any() else t[2:4],
    "index_select": lambda t: t.index_select(0, torch.tensor([5, 1])),
    "mask": lambda t: t[t[:, 0] > 5][:2],
    "roll": lambda t: t.roll(1, 0)[:2],
    "two conversions": lambda t: t.to(torch.bfloat16).to(torch.float32)[:2],
    "cat with other memory": lambda t: torch.cat([t[:1], torch.ones(1, 6)]),
    "a buffer of its own": lambda t: torch.zeros(2, 6).copy_(t[:2]),
    "half a buffer": lambda t: _half(torch.empty_like(t[:2]).zero_(), t),
    "overwritten buffer": lambda t: _twice(torch.empty_like(t[:3]), t),
}


def _half(buffer, tensor):
    buffer[0] = tensor[3]
    return buffer


def _twice(buffer, tensor):
    buffer.copy_(tensor[:3])
    buffer[1:].copy_(tensor[5:7])
    return buffer[:2]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_operation_fetches_the_whole_tensor(name):
    tensor = numbered(8, 6) / 3
    plan, fetched = check(single(UNKNOWN[name], (2, 6), lambda p: p, tensor), {"w": tensor})
    assert plan.opaque == ("w",)
    assert (len(plan), fetched) == (0, tensor.nbytes)


SINKS = {
    "data": lambda p: p.data,
    "narrow": lambda p: p.narrow(0, 1, 2)[:, :6],
    "transposed": lambda p: p.t()[1:7, 2:4].t(),
    "every other row": lambda p: p[::2, 2:],
}


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_that_is_a_view_of_the_parameter(name):
    tensor = numbered(4, 8)
    into = SINKS[name]
    rows = into(torch.empty(4, 8)).shape
    plan, _ = check(single(lambda t: t[-rows[0]:, :rows[1]], (4, 8), into, tensor), {"w": tensor})
    assert plan.opaque == ()


def test_setitem():
    def make():
        parameter = torch.empty(3, 4)

        def load(tensors):
            for name, tensor in tensors:
                parameter[int(name)] = tensor[1]
        return load, {"p": parameter}
    plan, fetched = check(make, {str(i): numbered(2, 4) + 10 * i for i in range(3)})
    assert (plan.opaque, fetched) == ((), 48)


@pytest.mark.parametrize("source,target", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
    (torch.float16, torch.float16), (torch.float32, torch.float8_e4m3fn),
    (torch.int64, torch.int32)])
def test_one_conversion_is_part_of_the_move(source, target):
    tensor = (numbered(6, 4) / 3).to(source)
    operation = lambda t: t[2:4].to(target)  # noqa: E731
    make = single(operation, (2, 4), lambda p: p, tensor, param_dtype=target)
    plan, _ = check(make, {"w": tensor})
    assert plan.opaque == ()


def test_bits_read_as_another_type():
    tensor = (numbered(6, 4) / 3).to(torch.float8_e4m3fn)
    make = single(lambda t: t.view(torch.uint8)[1:3], (2, 4), lambda p: p, tensor,
                  param_dtype=torch.uint8)
    plan, fetched = check(make, {"w": tensor})
    assert (plan.opaque, fetched) == ((), 8)


def test_scalars_and_empty_tensors():
    def make():
        targets = {"s": torch.empty(()), "one": torch.empty(1), "none": torch.empty(0, 4)}

        def load(tensors):
            for name, tensor in tensors:
                targets[name].copy_(tensor.view(targets[name].shape))
        return load, targets
    tensors = {"s": torch.tensor(3.5), "one": torch.tensor(2.5), "none": torch.empty(0, 4)}
    plan, fetched = check(make, tensors)
    assert (plan.opaque, fetched) == ((), 8)


def test_a_reused_buffer_has_what_it_had_when_it_was_copied():
    def make():
        targets = {"a": torch.empty(2, 4), "b": torch.empty(2, 4)}

        def load(tensors):
            buffer = None
            for name, tensor in tensors:
                buffer = torch.empty_like(tensor) if buffer is None else buffer
                buffer.copy_(tensor)
                targets[name].copy_(buffer.clone()[1:3])
        return load, targets
    plan, _ = check(make, {"a": numbered(4, 4), "b": numbered(4, 4) + 100})
    assert plan.opaque == ()


def test_what_nobody_reads_is_not_fetched():
    def make():
        parameter = torch.empty(4)

        def load(tensors):
            for name, tensor in tensors:
                if name == "mine":
                    parameter.copy_(tensor)
        return load, {"p": parameter}
    plan, fetched = check(make, {"other": numbered(100), "mine": numbered(4)})
    assert (fetched, [entry.name for entry in plan.entries]) == (16, ["mine"])


def test_the_later_of_two_writers_wins():
    def make():
        parameter = torch.empty(4)

        def load(tensors):
            for _, tensor in tensors:
                parameter.copy_(tensor)
        return load, {"p": parameter}
    plan, _ = check(make, {"a": numbered(4), "b": numbered(4) + 10})
    assert set(plan.opaque) == {"a", "b"}


def test_constants_come_with_the_plan():
    def make():
        parameter = torch.empty(6, 4)

        def load(tensors):
            for _, tensor in tensors:
                parameter[:4].copy_(tensor)
                parameter[4:].fill_(0.5)
        return load, {"p": parameter}
    plan, _ = check(make, {"w": numbered(4, 4)})
    assert (plan.opaque, [c.value for c in plan.constants]) == ((), [0.5])


def test_a_loader_that_clears_everything_first():
    """With an opaque tensor it does so again at the end, so nothing may have been moved before."""
    def make():
        targets = {"a": torch.empty(4), "b": torch.empty(4)}

        def load(tensors):
            for target in targets.values():
                target.zero_()
            for name, tensor in tensors:
                targets[name].copy_(tensor if name == "a" else tensor * 2)
        return load, targets
    plan, _ = check(make, {"a": numbered(4), "b": numbered(4)})
    assert set(plan.opaque) == {"a", "b"}


def test_a_loader_that_waits_for_a_pair():
    """One of the pair is opaque: alone, it would never be written."""
    def make():
        targets = {"a": torch.empty(4), "b": torch.empty(4)}

        def load(tensors):
            held = {}
            for name, tensor in tensors:
                held[name] = tensor
            if len(held) == 2:
                targets["a"].copy_(held["a"])
                targets["b"].copy_(held["b"] * 2)
        return load, targets
    plan, _ = check(make, {"a": numbered(4), "b": numbered(4)})
    assert set(plan.opaque) == {"a", "b"}


def test_a_loader_that_fails_on_stand_ins_gets_real_tensors():
    def make():
        targets = {"a": torch.empty(4), "b": torch.empty(4)}

        def load(tensors):
            for name, tensor in tensors:
                if name == "b" and type(tensor) is not torch.Tensor:
                    raise TypeError("only real ones")
                targets[name].copy_(tensor)
        return load, targets
    plan, _ = check(make, {"a": numbered(4), "b": numbered(4)})
    assert plan.opaque == ("b",)
    assert [move.name for move in plan.moves()] == ["a"]


def test_a_loader_that_cannot_begin_says_why():
    def load(tensors):
        raise KeyError("no such layer")
    with pytest.raises(KeyError, match="no such layer"):
        recording.record(load, catalog_of({"a": numbered(4)}), {"p": torch.empty(4)})


def test_a_parameter_that_is_replaced_is_put_back():
    module = torch.nn.Linear(4, 2, bias=False)
    before = module.weight

    def load(tensors):
        for _, tensor in tensors:
            module.weight = torch.nn.Parameter(tensor[:2])
    plan = recording.record(load, catalog_of({"w": numbered(4, 4)}), module)
    assert module.weight is before
    assert plan.opaque == ("w",)


def test_stand_ins_look_like_the_real_thing():
    seen = []

    def load(tensors):
        for _, t in tensors:
            part = t.t()[1:3]
            seen.append((
                part.shape, part.dtype, part.device, part.dim(), part.size(0), part.numel(),
                part.stride(), part.storage_offset(), part.is_contiguous(), t.is_contiguous(),
                t.element_size(), t.nbytes, t.is_floating_point(), isinstance(t, torch.Tensor)))
    tensor = numbered(8, 6, dtype=torch.bfloat16)
    recording.record(load, catalog_of({"w": tensor}), {"p": torch.empty(1)})
    load([("w", tensor)])
    assert seen[0] == seen[1]


VIEW_OPERATIONS = [
    lambda r, t: t.narrow(d := r.randrange(t.dim()), a := r.randrange(t.size(d)),
                          r.randint(1, t.size(d) - a)),
    lambda r, t: t.transpose(r.randrange(t.dim()), r.randrange(t.dim())),
    lambda r, t: t.flatten(0, r.randrange(t.dim())) if t.is_contiguous() else t,
    lambda r, t: t[::r.randint(1, 3)],
    lambda r, t: t[..., ::r.randint(1, 2)],
    lambda r, t: t.unsqueeze(r.randint(0, t.dim())),
    lambda r, t: t.select(r.randrange(t.dim()), -1) if t.dim() > 1 else t,
    lambda r, t: t.unflatten(0, (2, -1)) if t.size(0) % 2 == 0 else t,
    lambda r, t: t.movedim(0, -1),
    lambda r, t: t.chunk(2, r.randrange(t.dim()))[0],
    lambda r, t: t.expand(2, *t.shape),
]
COPIES = [
    lambda r, t: t.clone(),
    lambda r, t: t.contiguous(),
    lambda r, t: torch.cat([t, t.narrow(0, 0, 1)], 0),
    lambda r, t: torch.stack([t, t], r.randint(0, t.dim())),
    lambda r, t: t.reshape(-1),
]


@pytest.mark.parametrize("seed", range(250))
def test_any_chain_gives_the_bytes_of_the_loader(seed):
    """Whether followed or opaque: never a wrong slice. Views alone are always followed."""
    choose = random.Random(seed)
    shape = [choose.randint(1, 6) for _ in range(choose.randint(1, 4))]
    tensors = {"u": numbered(*shape), "v": numbered(*shape) + 1000}
    only_views = seed % 2 == 0
    operations = VIEW_OPERATIONS if only_views else VIEW_OPERATIONS + COPIES
    chain = [choose.choice(operations) for _ in range(choose.randint(1, 6))]
    state = choose.getstate()

    def apply(tensor):
        choose.setstate(state)
        for operation in chain:
            if tensor.dim() <= 4 and tensor.numel() < 2000:
                tensor = operation(choose, tensor)
        return tensor
    sizes = apply(tensors["u"]).shape

    def make():
        targets = {n: torch.empty([s + 1 for s in sizes]) for n in tensors}

        def load(items):
            for name, tensor in items:
                place = targets[name]
                for k, s in enumerate(sizes):
                    place = place.narrow(k, 1, s)
                place.copy_(apply(tensor))
        return load, targets
    plan, _ = check(make, tensors)
    if only_views:
        assert plan.opaque == ()


@pytest.mark.parametrize("mark", [torch.conj, lambda t: torch._neg_view(t.real)],
                         ids=["conj", "neg"])
def test_views_of_other_values_are_not_slices(mark):
    parameter = torch.empty(3, dtype=torch.complex64)

    def load(tensors):
        for _, tensor in tensors:
            parameter.copy_(mark(tensor))
    plan = recording.record(load, {"a": recording.TensorMeta((3,), torch.complex64)},
                            {"p": parameter})
    assert not len(plan) and plan.opaque == ("a",)


def test_what_a_loader_writes_to_many_parameters_at_once_is_not_replayed():
    targets = {"p": torch.ones(3), "q": torch.ones(3)}

    def load(tensors):
        torch._foreach_zero_([targets["q"]])
        for _, tensor in tensors:
            targets["p"].copy_(tensor)
    plan = recording.record(load, {"a": recording.TensorMeta((3,), torch.float32)}, targets)
    assert len(plan) == 1 and not plan.replayable
