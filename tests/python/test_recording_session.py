"""Recorded loaders on real agents: host memory, devices, and what happens when the version is
another.
"""
import sys

import pytest
import rekindle as rk
import torch
from rekindle import recording
from recording_fakes import LiveBytes, catalog_of, garbage, same_bits
from test_recording_loaders import Quantizing, Rank, checkpoint


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REKINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def agent(fleet):
    tensors = checkpoint()
    rk.publish(tensors, "ranks@1", agent=fleet.store("a"))
    rk.publish({**tensors, "norm": tensors["norm"].float()}, "ranks@2", agent=fleet.store("a"))
    return fleet.store("a")


def fresh(kind, tp, size):
    with torch.no_grad():
        model = kind(tp, size)
        for parameter in model.parameters():
            parameter.copy_(garbage(parameter))
    return model


def loaded(kind, tp, size):
    model = fresh(kind, tp, size)
    model.load_weights(checkpoint().items())
    return model


def assert_same(model, wanted):
    for name, parameter in wanted.named_parameters():
        assert same_bits(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("device", [None, "double:0"])
@pytest.mark.parametrize("kind", [Rank, Quantizing])
@pytest.mark.parametrize("tp", range(4))
def test_a_rank_gets_what_its_loader_reads(agent, kind, tp, device):
    model = fresh(kind, tp, 4)
    with recording.attach(model.load_weights, model, {"tp": [tp, 4]}, "ranks", 1, agent=agent,
                          device=device) as session:
        assert session.bytes_total < sum(t.nbytes for t in checkpoint().values())
        session.commit()
    assert_same(model, loaded(kind, tp, 4))


def test_the_second_time_the_loader_does_not_run(agent):
    model, runs = fresh(Rank, 0, 2), []

    def load(tensors):
        runs.append(1)
        return model.load_weights(tensors)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(garbage(parameter))
        recording.attach(load, model, {"case": "second"}, "ranks", 1, agent=agent).close()
        assert_same(model, loaded(Rank, 0, 2))
    assert len(runs) == 1


def test_a_version_of_other_tensors_is_refused(agent):
    model = fresh(Rank, 0, 2)
    plan = recording.record(model.load_weights, catalog_of(checkpoint()), model)
    with rk.attach("ranks", 2, shard=recording.boxes(plan), agent=agent) as session:
        wrong = r"norm is float32 \[16\] .* recorded for bfloat16 \[16\]"
        with pytest.raises(rk.InvalidError, match=wrong):
            recording.execute(plan, model.load_weights, model, session)


def test_everything_opaque_is_streamed_through_the_loader(agent):
    model = fresh(Rank, 1, 2)

    def load(tensors):
        return model.load_weights((name, tensor * 1)
                                  for name, tensor in tensors)
    with recording.attach(load, model, {"case": "opaque"}, "ranks", 1, agent=agent,
                          device="double:1") as session:
        session.commit()
    assert_same(model, loaded(Rank, 1, 2))


def test_shard_is_not_the_callers(agent):
    model = fresh(Rank, 0, 2)
    with pytest.raises(rk.InvalidError, match="no shard"):
        recording.attach(model.load_weights, model, {}, "ranks", agent=agent, shard="tp=0/2")


COUNT, SIZE = 24, 1 << 16  # tensors, bytes of each


@pytest.fixture(scope="module")
def many(agent):
    tensors = {f"{kind}{i:02}": torch.full((SIZE // 4,), float(i))
               for kind in ("computed", "moved") for i in range(COUNT)}
    rk.publish(tensors, "many@1", agent=agent)
    return agent


@pytest.mark.parametrize("device", [None, "double:0"])
@pytest.mark.parametrize("some_are_moved", [True, False])
def test_the_loader_is_given_one_tensor_after_the_other(many, device, some_are_moved):
    targets = {f"{kind}{i:02}": torch.zeros(SIZE // 4)
               for kind in ("computed", "moved") for i in range(COUNT)}
    given = []

    def load(tensors):
        for name, tensor in tensors:
            given.append(name)
            targets[name].copy_(tensor.add_(1) if "computed" in name or not some_are_moved
                                else tensor)
            if type(tensor) is torch.Tensor and some_are_moved:
                assert targets["moved03"][0] == 3  # moves are done before it runs
    case = {"case": f"one by one {some_are_moved}"}
    recording.attach(load, targets, case, "many", 1, agent=many).close()  # the plan
    given.clear()
    with LiveBytes() as live, recording.attach(load, targets, case, "many", 1, agent=many,
                                               device=device) as session:
        session.commit()
    assert given == [name for name in sorted(targets)
                     if "computed" in name or not some_are_moved]
    assert SIZE <= live.most <= 2 * SIZE
    for name, target in targets.items():
        added = "computed" in name or not some_are_moved
        assert torch.equal(target, torch.full_like(target, int(name[-2:]) + added)), name


@pytest.mark.parametrize("device", [None, "double:0"])
@pytest.mark.parametrize("most", [None, 0], ids=["in buffers", "one by one"])
def test_parts_of_boxes(many, device, most, monkeypatch):
    """Elements that are apart: their boxes are taken through a buffer, or as they come when these
    would be too large.
    """
    if most is not None:
        monkeypatch.setattr(sys.modules["rekindle.recording.execute"], "MOST_BUFFERED", most)
    targets = {f"moved{i:02}": torch.zeros(SIZE // 16) for i in range(COUNT)}

    def load(tensors):
        for name, tensor in tensors:
            if name in targets:
                targets[name].copy_(tensor[1::4])
    with LiveBytes() as live, recording.attach(load, targets, {"case": "parts"}, "many", 1,
                                               agent=many, device=device) as session:
        session.commit()
    assert all(torch.equal(target, torch.full_like(target, int(name[-2:])))
               for name, target in targets.items())
    assert live.most >= SIZE if device and most is None else live.most < SIZE


def test_a_loader_that_stops_early_can_be_committed(many):
    targets = {"computed00": torch.zeros(SIZE // 4)}

    def load(tensors):
        for name, tensor in tensors:
            targets[name].copy_(tensor + 2)
            break
    with recording.attach(load, targets, {"case": "early"}, "many", 1, agent=many) as session:
        session.commit()
    assert torch.equal(targets["computed00"], torch.full((SIZE // 4,), 2.0))


def test_a_loader_that_reads_nothing_is_told_what_there_is(agent):
    with pytest.raises(rk.InvalidError, match=r"reads none of the \d+ tensors of ranks@1.*embed"):
        recording.attach(lambda tensors: None, {"p": torch.zeros(1)}, {}, "ranks", 1, agent=agent)


@pytest.mark.parametrize("device, name", [(None, "merged-host"), ("double:0", "merged-device")])
def test_many_boxes_of_one_tensor(agent, device, name):
    count = 300
    whole = torch.arange(count * 8.0).reshape(count, 2, 4)
    rk.publish({"w": whole}, f"{name}@1", agent=agent)
    targets = {str(i): torch.zeros(4) for i in range(count)}

    def load(tensors):
        for _, tensor in tensors:
            for i in range(count):
                targets[str(i)].copy_(tensor[i, 1])
    with recording.attach(load, targets, {"case": "merged"}, name, 1, agent=agent,
                          device=device) as session:
        assert session.bytes_total == whole.nbytes // 2
        session.commit()
    assert all(torch.equal(targets[str(i)], whole[i, 1]) for i in range(count))
