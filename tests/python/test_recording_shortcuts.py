"""The short way of stand-ins' view methods says what torch's dispatch says, and is taken only where
nobody could tell.
"""
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from recording_fakes import check
from rekindle import recording
from rekindle.recording.shortcuts import METHODS
from rekindle.recording.tracer import NeedsData, Recorder, Traced
from torch.utils._python_dispatch import TorchDispatchMode

SHORT = {
    "int": lambda t: t[2],
    "negative": lambda t: t[-1],
    "slices": lambda t: t[1:7:2, ..., 1:],
    "all": lambda t: t[:],
    "nothing": lambda t: t[3:3],
    "new axis": lambda t: t[None, :, 2],
    "chunk": lambda t: t.chunk(3, dim=1),
    "expand": lambda t: t[0].expand(3, -1),
    "expand size": lambda t: t[:1].expand(torch.Size([5, 6])),
    "flatten": lambda t: t.flatten(),
    "flatten of one": lambda t: t[0].flatten(),
    "narrow": lambda t: t.narrow(0, 2, 3),
    "narrow by names": lambda t: t.narrow(dim=1, start=-2, length=2),
    "permute": lambda t: t.permute(1, 0),
    "permute tuple": lambda t: t.permute((1, 0)),
    "reshape": lambda t: t.reshape(-1, 2, 3),
    "select": lambda t: t.select(1, -1),
    "split": lambda t: t.split(3),
    "split sizes": lambda t: t.split([2, 6], dim=0),
    "squeeze": lambda t: t[:, 3:4].squeeze(-1),
    "squeeze nothing": lambda t: t.squeeze(),
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, -1),
    "unbind": lambda t: t.unbind(1),
    "iterate": lambda t: tuple(t),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "view": lambda t: t.view(4, 12),
    "view of a list": lambda t: t.view([2, -1]),
    "many": lambda t: t.t()[1:5].unsqueeze(0).narrow(2, 1, 4).chunk(2, 2)[1].transpose(0, 1),
}
LONG = {
    "list": lambda t: t[[0, 1]],
    "bool": lambda t: t[True],
    "tensor": lambda t: t[torch.tensor([1, 0])],
    "mask": lambda t: t[t > 3],
    "itself": lambda t: t[t],
    "numbers of its own": lambda t: t[t[0, 0]:],
    "other bits": lambda t: t.view(torch.int32),
    "reshape that copies": lambda t: t.t().reshape(-1),
    "out of range": lambda t: t[8],
    "too many": lambda t: t[0, 0, 0],
    "bad view": lambda t: t.view(5, 5),
    "bad narrow": lambda t: t.narrow(0, 7, 2),
    "bad sizes": lambda t: t.split([1, 1]),
    "text": lambda t: t.view("8"),
}


class PassingOn(TorchDispatchMode):
    """Another's mode, that looks on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._schema.name)
        return func(*args, **kwargs or {})


def outcome(operation, mode):
    """What an operation gives for a stand-in, in words; and how often torch has dispatched."""
    recorder, calls = Recorder({}, torch.device("cpu")), []
    dispatch = recorder.dispatch
    recorder.dispatch = lambda func, *rest: calls.append(func) or dispatch(func, *rest)
    with torch.no_grad(), recorder, mode:
        tensor = recorder.tensor("w", recording.TensorMeta((8, 6), torch.float32))
        try:
            made = operation(tensor)
        except (NeedsData, IndexError, RuntimeError, TypeError, ValueError) as error:
            return (type(error), str(error)), len(calls)
        made = made if type(made) in (tuple, list) else [made]
        return [described(one, tensor) for one in made], len(calls)


def described(made, tensor):
    """A base that was made anew is another object in every run."""
    view = made.view_of()
    base = "same" if view.base is tensor.view_of().base else type(view.base).__name__
    return (type(made), made is tensor, base, view[1:], tuple(made.shape), made.stride(),
            made.storage_offset(), made.dtype, made.device)


@pytest.mark.parametrize("mode", [PassingOn, lambda: torch.device("cpu")],
                         ids=["dispatch mode", "function mode"])
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_both_ways_say_the_same(name, mode):
    operation = {**SHORT, **LONG}[name]
    usual, dispatches = outcome(operation, contextlib.nullcontext())
    dispatched, all_dispatches = outcome(operation, mode())
    assert usual == dispatched
    if name in SHORT:
        assert dispatches == 0 < all_dispatches


@pytest.mark.parametrize("name", SHORT)
def test_it_is_what_torch_does_with_real_tensors(name):
    tensor = torch.arange(48.0).reshape(8, 6)
    made = SHORT[name](tensor)
    wanted = [(tuple(one.shape), one.stride(), one.storage_offset())
              for one in (made if type(made) is tuple else [made])]
    assert [one[4:7] for one in outcome(SHORT[name], contextlib.nullcontext())[0]] == wanted


def test_every_method_is_tried():
    used = set()
    for name in METHODS:
        method = getattr(Traced, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Traced, name,
                          lambda *a, m=method, n=name, **k: used.add(n) or m(*a, **k))
            for operation in SHORT.values():
                outcome(operation, contextlib.nullcontext())
    assert used == set(METHODS)


def test_what_changes_nothing_gives_the_stand_in_itself():
    def flatten(tensor):
        row = tensor[0]
        assert row.flatten() is row
        return row
    assert outcome(flatten, contextlib.nullcontext())[1] == 0


def test_modes_of_others_see_every_operation():
    mode = PassingOn()
    outcome(lambda t: t.view(4, 12)[1].unsqueeze(0), mode)
    assert mode.seen == ["aten::view", "aten::select", "aten::unsqueeze"]


@pytest.mark.parametrize("ask", [
    lambda t: torch.tensor([t[0, 0], t[1, 1]]), lambda t: torch.tensor([t[0, :1]]),
    lambda t: [0, 1][t[0, 0]], lambda t: 3 in t], ids=["scalars", "vectors", "index", "in"])
def test_a_stand_in_is_no_sequence_of_numbers(ask):
    (error, _), _ = outcome(ask, contextlib.nullcontext())
    assert error is NeedsData


def test_other_memory_for_a_tensor_is_not_followed():
    """`.data = ` is no operation of torch's that anybody sees."""
    def make():
        target = torch.empty(3)

        def load(tensors):
            for _, tensor in tensors:
                with torch.no_grad():
                    tensor.data = tensor.data[2:]
                    target.copy_(tensor[0])
        return load, {"target": target}
    plan, _ = check(make, {"w": torch.arange(12.0).reshape(4, 3)})
    assert plan.opaque == ("w",)


def test_nobody_else_makes_stand_ins():
    def make():
        target = torch.empty(2)

        def load(tensors):
            for _, tensor in tensors:
                if type(tensor) is Traced:
                    with ThreadPoolExecutor(1) as pool, pytest.raises(TypeError, match="Recorder"):
                        pool.submit(type(tensor), [1.0, 2.0]).result()
                with torch.no_grad():
                    target.copy_(tensor)
        return load, {"target": target}
    plan, _ = check(make, {"w": torch.ones(2)})
    assert plan.opaque == ()


@pytest.mark.parametrize("use", [lambda t: t[0], lambda t: t.view(-1), lambda t: t.chunk(2)])
def test_after_the_recording_there_are_no_views(use):
    kept = []

    def load(tensors):
        kept.extend(tensor for _, tensor in tensors)
    recording.record(load, {"w": recording.TensorMeta((8, 6), torch.float32)}, {})
    with pytest.raises(RuntimeError, match="the loader has kept it"):
        use(kept[0])


def test_in_threads():
    def make():
        targets = {str(i): torch.empty(2, 3) for i in range(40)}

        def put(pair):
            with torch.no_grad():
                targets[pair[0]].copy_(pair[1].view(4, 2, 3)[int(pair[0]) % 4].transpose(0, 1).t())

        def load(tensors):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(put, tensors))
        return load, targets
    plan, fetched = check(make, {str(i): torch.arange(24.0).reshape(8, 3) + 100 * i
                                 for i in range(40)})
    assert (plan.opaque, fetched) == ((), 40 * 24)


def test_tensors_of_one_shape_cut_in_the_same_and_in_other_ways():
    """What is known of one is used for the next only where the box is the same, too."""
    cuts = {"a": [slice(0, 2)], "b": [slice(0, 2), slice(0, 5)], "c": [slice(0, 2), slice(1, 3)],
            "d": [slice(0, 2)]}

    def make():
        targets = {f"{name}{i}": torch.empty(6 if name == "d" else 3, cut.stop - cut.start)
                   for name, part in cuts.items() for i, cut in enumerate(part)}

        def load(tensors):
            for name, tensor in tensors:
                for i, cut in enumerate(cuts[name]):
                    targets[f"{name}{i}"][::2 if name == "d" else 1].copy_(tensor[:, cut])
        return load, targets
    plan, fetched = check(make, {name: torch.arange(24.0).reshape(3, 8) + 100 * i
                                 for i, name in enumerate(cuts)})
    assert (plan.opaque, fetched) == ((), 4 * 3 * (2 + 5 + 2 + 2 + 2))
