"""rekindle.torch.publish gives a publication the rank's parts, one by one."""
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import rekindle.torch  # noqa: E402


class Recorder:
    """Stands in for rekindle.joint.publisher."""

    def __init__(self):
        self.calls, self.files, self.added, self.ended = [], {}, [], None

    def publisher(self, model_version, *, rank, world, agent):
        self.calls.append((model_version, rank, world, agent))
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self.ended = kind

    def add_part(self, part):
        self.added.append((part.name, part.offset, part.read()))

    def file(self, name, data):
        self.files[name] = data

    def commit(self, timeout):
        return ("published", timeout)


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    joint = types.ModuleType("rekindle.joint")
    joint.publisher = made.publisher
    monkeypatch.setitem(sys.modules, "rekindle.joint", joint)
    return made


def test_a_single_rank_publishes_the_whole_model(recorder):
    model = torch.nn.Linear(2, 3)
    assert rekindle.torch.publish(model, "m@4", files={"config.json": b"{}"}, agent="/dev/shm/s",
                                  timeout=5) == ("published", 5)
    assert recorder.calls == [("m@4", 0, 1, "/dev/shm/s")]
    assert [(name, offset) for name, offset, _ in recorder.added] == [
        ("weight", (0, 0)), ("bias", (0,))]
    assert torch.equal(recorder.added[0][2], model.weight) and not recorder.added[0][
        2].requires_grad
    assert recorder.files == {"config.json": b"{}"}


def test_rank_and_world_are_those_of_torch_distributed(recorder):
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        rekindle.torch.publish({"w": torch.zeros(2)}, "m@4", files={"config.json": b"{}"})
        rekindle.torch.publish({"w": torch.zeros(2)}, "m@4", rank=1, world=2)
        assert [call[1:3] for call in recorder.calls] == [(2, 4), (1, 2)]
        assert recorder.files == {}, "only rank 0 gives files"
        others = dist.new_group([0, 1])
        with pytest.raises(rekindle.InvalidError, match="rank -1 .*only members of the group"):
            rekindle.torch.publish({"w": torch.zeros(2)}, "m@4", group=others)
    finally:
        dist.destroy_process_group()


def test_mistakes_are_told_before_the_publication_begins(recorder):
    with pytest.raises(rekindle.InvalidError, match="give rank and world, or neither"):
        rekindle.torch.publish({"w": torch.zeros(2)}, "m@4", rank=0)
    with pytest.raises(rekindle.InvalidError, match="rank 2 is not in a world of 2"):
        rekindle.torch.publish({"w": torch.zeros(2)}, "m@4", rank=2, world=2)
    with pytest.raises(rekindle.InvalidError, match="matches no tensor"):
        rekindle.torch.publish({"w": torch.zeros(2)}, "m@4", names=[("x", "y")])
    assert recorder.calls == []


def test_conversions_run_one_by_one_as_parts_are_added(recorder):
    order = []

    def convert(part):
        return [part._replace(read=lambda: order.append(part.name) or part.read())]
    recorder.add_part = lambda part: (order.append(f"add {part.name}"), part.read())
    rekindle.torch.publish({"a": torch.zeros(1), "b": torch.zeros(1)}, "m@4", convert=convert)
    assert order == ["add a", "a", "add b", "b"]


def test_an_error_while_reading_ends_the_publication(recorder):
    def convert(part):
        return [part._replace(read=lambda: 1 / 0)]
    with pytest.raises(ZeroDivisionError):
        rekindle.torch.publish({"a": torch.zeros(1)}, "m@4", convert=convert)
    assert recorder.ended is ZeroDivisionError
