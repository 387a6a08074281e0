"""Recorded loaders on real agents: host memory, devices, and what happens when the version is
another.
"""
import pytest
import rekindle as rk
import torch
from rekindle import recording
from recording_fakes import catalog_of, garbage, same_bits
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
