"""Loaders that do more than a plan can stand for: never silently wrong."""
import logging

import pytest
import torch
from recording_fakes import FakeSession, catalog_of, check
from rekindle import recording
from rekindle.recording.effects import Unrecordable
from rekindle.recording.recorder import record_or_refuse
from torch import nn

TENSORS = {"a": torch.arange(12.0).reshape(3, 4) + 1, "b": torch.arange(4.0) + 50}


class Model(nn.Module):
    """Two parameters, a map that nothing fills, and what it does after they are loaded."""

    def __init__(self, after=lambda model, tensors: None):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 4))
        self.b = nn.Parameter(torch.zeros(4))
        self.derived = nn.Parameter(torch.zeros(4))
        self.register_buffer("experts", torch.tensor([1, 0]))
        self.seen, self.after = [], after

    def load_weights(self, tensors):
        given = {}
        for name, tensor in tensors:
            given[name] = tensor
            parameter = self.get_parameter(name)
            parameter.data.copy_(tensor[:2] if name == "a" else tensor)
        self.after(self, given)


def derive(model, tensors):
    model.derived.data.copy_(model.a.sum(0))


def derive_an_attribute(model, tensors):
    model.scale = model.b.max() * 2


def scale_in_place(model, tensors):
    model.b.data.mul_(2)


def add_each_other(model, tensors):
    if "b" in tensors:
        model.derived.data.copy_(tensors["b"] + model.a[0])


def keep_in_an_attribute(model, tensors):
    model.kept = tensors.get("a")


def keep_in_a_dict(model, tensors):
    model.__dict__.setdefault("store", {}).update(tensors)


EFFECTS = [derive, derive_an_attribute, scale_in_place, add_each_other, keep_in_an_attribute,
           keep_in_a_dict]


def run(after, mapping):
    model = Model(after)
    targets = dict(model.named_parameters()) if mapping else model
    plan = recording.record(model.load_weights, catalog_of(TENSORS), targets)
    session = FakeSession(TENSORS, recording.boxes(plan))
    recording.execute(plan, model.load_weights, targets, session)
    return model, plan


@pytest.mark.parametrize("mapping", [False, True], ids=["module", "mapping"])
@pytest.mark.parametrize("after", EFFECTS)
def test_such_a_loader_is_given_whole_tensors(after, mapping, caplog):
    wanted = Model(after)
    with torch.no_grad():
        wanted.load_weights((name, tensor.clone()) for name, tensor in TENSORS.items())
    with caplog.at_level(logging.INFO, "rekindle"):
        model, plan = run(after, mapping)
    assert (len(plan), plan.opaque) == (0, ("a", "b"))
    assert "whole tensors" in caplog.text
    for name, parameter in wanted.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    for name in ("scale", "kept"):
        absent = torch.ones(1)
        assert torch.equal(getattr(model, name, absent), getattr(wanted, name, absent))
    for name, tensor in wanted.__dict__.get("store", {}).items():
        assert torch.equal(model.store[name], tensor)


@pytest.mark.parametrize("after", EFFECTS)
def test_it_can_be_refused_instead(after):
    model = Model(after)
    with pytest.raises(Unrecordable, match="it (does|sets|keeps)"):
        record_or_refuse(model.load_weights, catalog_of(TENSORS), model)


def test_a_function_that_keeps_tensors_where_nobody_looks():
    target, kept = torch.zeros(4), []

    def load(tensors):
        for name, tensor in tensors:
            kept.append(tensor[:1])
            if name == "b":
                target.copy_(tensor)
    plan = recording.record(load, catalog_of(TENSORS), {"b": target})
    assert (len(plan), plan.opaque) == (0, ("a", "b"))
    with pytest.raises(RuntimeError, match="the loader has kept it"):
        target.copy_(kept[0][0])
    with pytest.raises(RuntimeError, match="the loader has kept it"):
        kept[0].item()


def test_what_is_not_filled_may_be_read():
    def after(model, tensors):
        assert int(model.experts.argmax()) == 0
    model, plan = run(after, mapping=False)
    assert (len(plan), plan.opaque, plan.replayable) == (2, (), True)
    assert torch.equal(model.a, TENSORS["a"][:2])


def test_what_is_set_without_tensors_holds_for_this_process():
    def after(model, tensors):
        model.is_loaded = True
    model, plan = run(after, mapping=False)
    assert (len(plan), plan.replayable) == (2, False)
    assert torch.equal(model.b, TENSORS["b"])


def test_tensors_in_cycles_are_kept_by_nobody():
    target = torch.zeros(4)

    def load(tensors):
        for name, tensor in tensors:
            cycle = [tensor]
            cycle.append(cycle)
            if name == "b":
                target.copy_(tensor)
    plan = recording.record(load, catalog_of(TENSORS), {"b": target})
    assert [move.name for move in plan.moves()] == ["b"]


def test_a_parameter_without_memory():
    model = nn.LazyLinear(2)

    def load(tensors):
        pass
    plan = recording.record(load, catalog_of(TENSORS), model)
    assert (len(plan), plan.opaque) == (0, ("a", "b"))


# --- the same memory written twice

def writes(order, regions):
    """A loader that writes each named tensor to its region of one parameter."""
    def make():
        parameter = torch.empty(8)

        def load(tensors):
            for name, tensor in tensors:
                start, count = regions[name]
                parameter[start:start + count].copy_(tensor[:count])
        return load, {"p": parameter}
    tensors = {name: torch.arange(8.0) + 10 * i for i, name in enumerate(sorted(regions), 1)}
    return check(make, {name: tensors[name] for name in order})


@pytest.mark.parametrize("order", ["xyz", "zyx", "yxz"])
def test_the_later_in_the_catalog_wins(order):
    """check() compares with the loader; entries of its session come in another order."""
    plan, _ = writes(order, {"x": (0, 4), "y": (2, 4), "z": (6, 2)})
    assert plan.opaque == tuple(name for name in order if name != "z")
    assert [move.name for move in plan.moves()] == ["z"]


def test_targets_that_overlap_by_different_names():
    def make():
        memory = torch.empty(6, 4)
        targets = {"rows": memory[2:4], "all": memory, "column": memory[:, 1]}

        def load(tensors):
            for name, tensor in tensors:
                targets[name].copy_(tensor)
        return load, targets
    tensors = {"rows": torch.ones(2, 4), "column": torch.full((6,), 3.0), "all": torch.zeros(6, 4)}
    plan, _ = check(make, tensors)
    assert plan.opaque == ("rows", "column", "all")


def test_columns_of_one_memory_do_not_overlap():
    def make():
        memory = torch.empty(6, 8)
        targets = {str(i): memory[:, i:i + 2] for i in range(0, 8, 2)}

        def load(tensors):
            for name, tensor in tensors:
                targets[name].copy_(tensor)
        return load, targets
    plan, _ = check(make, {str(i): torch.full((6, 2), i + 1.0) for i in range(0, 8, 2)})
    assert plan.opaque == ()


@pytest.mark.parametrize("twice", [False, True])
def test_many_slices_over_a_constant(twice):
    """More than are compared one by one; one that is written twice is found among them."""
    count = 600

    def make():
        parameter = torch.empty(4, count)

        def load(tensors):
            parameter.fill_(0.5)
            for name, tensor in tensors:
                parameter[1:, int(name) % count].copy_(tensor)
        return load, {"p": parameter}
    tensors = {str(i): torch.full((3,), i + 1.0) for i in range(count + twice)}
    plan, _ = check(make, tensors)
    assert ("0" in plan.opaque) == twice
    assert len(plan) == (0 if twice else count)


def test_a_constant_again_after_what_was_written_over_it():
    def make():
        parameter = torch.empty(4)

        def load(tensors):
            for _, tensor in tensors:
                parameter.zero_()
                parameter.copy_(tensor)
                parameter.zero_()
        return load, {"p": parameter}
    plan, _ = check(make, {"w": torch.ones(4)})
    assert plan.opaque == ("w",)


@pytest.mark.parametrize("ask", [lambda tensor: tensor * 2, lambda tensor: float(tensor.sum())],
                         ids=["computes", "asks for values"])
def test_a_loader_that_sets_what_it_is_not_given_is_given_everything(ask):
    def make():
        targets = {name: torch.empty(4) for name in "abc"}

        def load(tensors):
            given = dict(tensors)
            for name, target in targets.items():
                if name not in given:
                    target.zero_()
                    continue
                target.copy_(ask(given[name]) * given[name] if name == "b" else given[name])
        return load, targets
    plan, _ = check(make, {name: torch.full((4,), i + 2.0) for i, name in enumerate("abc")})
    assert (len(plan), plan.opaque) == (0, ("a", "b", "c"))


def test_a_run_that_asks_for_values_leaves_no_stand_in():
    class Keeping(Model):
        kept = None

        def load_weights(self, tensors):
            for name, tensor in tensors:
                if name == "a":
                    self.kept = tensor
                    self.a.data.copy_(tensor[:2] * float(tensor.sum()))
                    self.kept = None
                else:
                    self.b.data.copy_(tensor)
    model = Keeping()
    plan = recording.record(model.load_weights, catalog_of(TENSORS), model)
    assert (plan.opaque, model.kept) == (("a",), None)


def test_a_constant_below_the_loaders_own_values_is_not_written_again():
    def own(model, tensors):
        model.derived.data.zero_()
        model.derived.data[1:3].copy_(torch.tensor([3.0, 4.0]))

    model, plan = run(own, mapping=False)
    assert not plan.replayable and len(plan) == 2
    assert model.derived.tolist() == [0, 3, 4, 0]
