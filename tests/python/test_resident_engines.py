"""Models of engines that outlive their worker, after post-processing, on doubles of a GPU: real
agents, keepers and workers, and a stand-in for an engine. vLLM itself: engines/."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import rekindle
from conftest import Rekindle
from rekindle._engines import postprocessing
from rekindle._engines.on_meta import OnMeta
from test_resident import keeper_of, residents

WORKER = pathlib.Path(__file__).with_name("engine_process.py")


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {f"{layer}.{part}": torch.randn(shape, generator=generator)
            for layer, size in (("first", 300), ("second", 700))
            for part, shape in (("weight", (size, 256)), ("bias", (size,)))}


@pytest.fixture(scope="module")
def fleet(memory_directory):
    directory = memory_directory / "resident-engines"
    directory.mkdir()
    running = Rekindle(directory)
    for version in (1, 2):
        rekindle.publish(weights(version), f"e@{version}", agent=running.store("a"))
    yield running
    running.close()
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(keeper_of(running), signal.SIGKILL)


@pytest.fixture(autouse=True)
def nothing_left(fleet):
    yield
    fleet.run("release", "e", "--store", fleet.store("a"))


class Worker:
    def __init__(self, fleet, kind="plain", **options):
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(fleet.store("a")), kind, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        return json.loads(line)

    def tell(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()


def crashed(fleet, kind="plain", *orders, **options):
    """What a worker says before it is killed."""
    with Worker(fleet, kind, **options) as worker:
        said = worker.ready
        for order in orders:
            said = worker.tell(order)
    return said


def alike(first, second):
    assert second["rung"] == "resident" and second["kept"] and not second["warned"], second["warned"]
    for what in ("tensors", "plain", "tied"):
        assert second[what] == first[what]


@pytest.mark.parametrize("kind", ["plain", "quantized", "twice"])
def test_a_successor_gets_the_model_as_it_was_after_post_processing(fleet, kind):
    first = crashed(fleet, kind)
    assert first["kept"] and first["rung"] == "local" and not first["warned"], first["warned"]
    second = crashed(fleet, kind)
    alike(first, second)
    assert second["meta"] > 0, "its weights took no memory of their own"


def test_an_object_of_post_processing_is_named_and_nothing_is_kept(fleet):
    first = crashed(fleet, "kernel")
    assert not first["kept"] and not residents(fleet)
    assert "first.method.kernel has become a __main__.Kernel" in first["warned"][0]
    assert crashed(fleet, "kernel")["rung"] == "local"


def test_an_engine_that_makes_such_objects_alone_makes_them_again(fleet):
    first = crashed(fleet, "kernel", rebuilds=True)
    assert first["kept"] and first["kernel"]
    second = crashed(fleet, "kernel", rebuilds=True)
    alike(first, second)
    assert second["kernel"], "of the weights that the model has"
    crashed(fleet, "kernel", rebuilds=True)
    # Another build of the engine no longer does.
    third = crashed(fleet, "kernel")
    assert third["rung"] == "local"


def test_memory_that_an_object_elsewhere_has_too_is_not_kept(fleet):
    """An update in place would not reach it."""
    first = crashed(fleet, "alias")
    assert not first["kept"] and "first.weight is shared" in first["warned"][0]


def test_an_engine_may_change_small_tensors_while_it_serves(fleet):
    first = crashed(fleet, "quantized")
    second = crashed(fleet, "quantized", "serve")
    assert second["tensors"] != first["tensors"]


def test_what_changed_while_it_served_is_as_after_the_load(fleet):
    with Worker(fleet, "quantized") as worker:
        first = worker.ready
        assert worker.tell("serve")["tensors"] != first["tensors"]
    alike(first, crashed(fleet, "quantized"))


def test_a_weight_that_changed_is_mended(fleet):
    """Post-processing left it as it was published."""
    with Worker(fleet) as worker:
        worker.tell("scribble")
    alike(worker.ready, crashed(fleet))


def test_a_post_processed_weight_that_changed_is_not_handed_over(fleet):
    """The host's copy has other bytes."""
    with Worker(fleet, "quantized") as worker:
        worker.tell("scribble")
    assert crashed(fleet, "quantized")["rung"] == "local"


@pytest.mark.parametrize("kind", ["plain", "twice"])
def test_an_update_is_kept_and_the_next_successor_updates_again(fleet, kind):
    with Worker(fleet, kind) as worker:
        first = worker.ready
        second = worker.tell("update 2")
        assert second["kept"] and second["at"] == first["at"], second["warned"]
        assert second["tensors"] != first["tensors"]
    with Worker(fleet, kind, version=2) as worker:
        alike(second, worker.ready)
        third = worker.tell("update 1")
        assert third["kept"] and third["tensors"] == first["tensors"], third["warned"]
    alike(third, crashed(fleet, kind))


def test_an_update_that_makes_an_object_ends_it(fleet):
    with Worker(fleet) as worker:
        said = worker.tell("update 2 object")
        assert not said["kept"] and "first.method.kernel" in said["warned"][-1]
        assert not residents(fleet)


@pytest.mark.parametrize("options, why", [
    ({"other": True}, "third"), ({"lose": True}, "memory that is no tensor of a module")])
def test_a_copy_that_does_not_fit_ends_in_a_load(fleet, options, why):
    first = crashed(fleet)
    second = crashed(fleet, **options)
    assert second["rung"] == "local" and why in second["warned"][0]
    assert second["tensors"] == first["tensors"] and second["kept"]


def test_another_key_loads(fleet):
    crashed(fleet)
    assert crashed(fleet, key="another")["rung"] == "local"


# --- what changes in Python


class Helper:
    def __init__(self):
        self.count, self.tensor, self.items = 1, torch.zeros(2), [1, "a"]


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.helper, self.call = Helper(), self.forward


def changed(change):
    model = nn.Sequential(Module())
    before = postprocessing.noted(model)
    change(model[0])
    return model, *postprocessing.changes(before, postprocessing.noted(model))


@pytest.mark.parametrize("value", [
    True, 3, 0.1, float("inf"), "text", None, torch.float8_e4m3fn, torch.Size([1, 2]), [1, [2.5]],
    (None, "a"), torch.device("cpu")])
def test_a_plain_value_is_made_in_a_successor(value):
    _, found, other = changed(lambda module: setattr(module.helper, "new", value))
    assert other is None
    successor = nn.Sequential(Module())
    postprocessing.make(successor, json.loads(json.dumps(found)))
    got = successor[0].helper.new
    assert got == value and type(got) is type(value)


def test_an_attribute_that_is_gone_is_gone_in_a_successor():
    _, found, other = changed(lambda module: delattr(module.helper, "items"))
    successor = nn.Sequential(Module())
    postprocessing.make(successor, json.loads(json.dumps(found)))
    assert other is None and not hasattr(successor[0].helper, "items")


@pytest.mark.parametrize("change, named", [
    (lambda module: setattr(module, "helper", Helper()), "0.helper has become a"),
    (lambda module: setattr(module.helper, "made", lambda: 1), "0.helper.made has become a"),
    (lambda module: setattr(module.helper, "kept", {"a": Helper()}), "0.helper.kept"),
    (lambda module: module.helper.tensor.add_(1), "0.helper.tensor"),
    (lambda module: setattr(module.helper, "tensor", torch.zeros(2)), "0.helper.tensor"),
    (lambda module: setattr(module, "more", nn.Linear(1, 1)), "0.more"),
    (lambda module: module.register_module("helper2", None), None)])
def test_any_other_change_is_named(change, named):
    _, found, other = changed(change)
    assert (other is None) if named is None else (named in other), (found, other)


def test_a_model_without_changes_has_none():
    assert changed(lambda module: None)[1:] == ([], None)


def test_only_large_uninitialized_tensors_of_the_device_are_on_meta():
    with torch.device("cpu"), OnMeta(torch.device("cpu")) as made:
        large, small = torch.empty(1 << 20), torch.empty(8)
        zeros, noted = torch.zeros(1 << 20), large.to("meta")
    assert large.is_meta and not small.is_meta and not zeros.is_meta
    assert made.leftover() == 1, "a note of a layout has memory of its own"
    assert noted.is_meta and noted.shape == large.shape
    view = large[1:]
    del large
    assert made.leftover() == 1
    del view
    assert made.leftover() == 0
