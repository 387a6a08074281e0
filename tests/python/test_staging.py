"""A version that is taken beside the one that serves: the model is untouched until the switch, the
instance stays ready, and whatever fails before the switch changes nothing."""
import json
import os
import signal
import subprocess
import sys
import threading
from urllib import request

import pytest
import torch
from conftest import BINARY, PATIENCE_S, eventually
from torch import nn

import rekindle as rk
from rekindle import torch as rekindle_torch
from rekindle._staging import Phases, Staged, Staging

GIB = 1 << 30


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(300, 700), requires_grad=False) for _ in range(6))


def weights(version, like=None):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(value.shape, generator=generator)
            for name, value in (like or Model()).state_dict().items()}


def has(model, version):
    return all(torch.equal(value, weights(version)[name])
               for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def published(fleet, store):
    for version in (1, 2, 3):
        rk.publish(weights(version), f"staged@{version}", agent=store)


def options(store, rank=0, instance=None, generation=0, device="double:0"):
    return {"agent": store, "device": device, "instance": instance or f"st-{rank}",
            "generation": generation}


def ready(fleet, store, instance):
    """Whether routers may send requests to the instance."""
    return os.path.exists(os.path.join(store, "agent", "ready", instance))


def serving(store, **more):
    model = Model()
    session = rekindle_torch.load(model, "staged", 1, **options(store, **more))
    session.commit(PATIENCE_S)
    return model, session


@pytest.mark.parametrize("device", ["double:0", None], ids=["double", "host"])
def test_the_model_and_its_instance_serve_until_the_switch(fleet, store, published, device):
    instance = f"serves-{device is None}"
    model, first = serving(store, instance=instance, device=device)
    places = [value.data_ptr() for value in model.parameters()]
    with rekindle_torch.stage(model, "staged", 2, staging="require", reserve_bytes=0,
                              **options(store, instance=instance, generation=1,
                                        device=device)) as staged:
        assert staged.wait(PATIENCE_S) and staged.reason is None
        assert has(model, 1) and ready(fleet, store, instance)
        assert first.version == 1 and not first.closed
        seen = []
        second = staged.switch(resume=lambda: seen.append(has(model, 2)))
    assert seen == [True] and has(model, 2) and ready(fleet, store, instance)
    assert [value.data_ptr() for value in model.parameters()] == places
    assert set(staged.phases) == {"declare", "copy", "apply", "resume"}
    with pytest.raises(rk.StaleError):
        first.wait_for_update(0)  # its rank has moved on
    assert second.version == 2
    first.close()
    second.close()


def test_without_room_it_is_refused_with_the_numbers(fleet, store, published):
    model, first = serving(store, rank=1)
    reserve = 8 * GIB
    with pytest.raises(rk.ExhaustedError) as said:
        rekindle_torch.stage(model, "staged", 2, staging="require", reserve_bytes=reserve,
                             **options(store, 1, generation=1))
    text = str(said.value)
    assert "no room to stage staged@2" in text and "double:0" in text and "\n" not in text
    assert "4.81 MiB" in text and "8.00 GiB" in text
    assert has(model, 1) and ready(fleet, store, "st-1")
    first.close()


def test_without_room_auto_loads_in_the_pause_and_says_why(fleet, store, published):
    model, first = serving(store, rank=2)
    staged = rekindle_torch.stage(model, "staged", 2, reserve_bytes=8 * GIB,
                                  **options(store, 2, generation=1))
    assert "no room to stage staged@2" in staged.reason
    assert has(model, 1) and ready(fleet, store, "st-2")
    second = staged.switch()
    assert has(model, 2) and ready(fleet, store, "st-2")
    assert "copy" not in staged.phases
    first.close()
    second.close()


def test_off_never_stages(fleet, store, published):
    model, first = serving(store, rank=3)
    staged = rekindle_torch.stage(model, "staged", 2, staging="off",
                                  **options(store, 3, generation=1))
    assert "off" in staged.reason and has(model, 1)
    staged.switch().close()
    assert has(model, 2)
    with pytest.raises(rk.InvalidError, match="auto, require, off"):
        rekindle_torch.stage(model, "staged", 2, staging="gpu", **options(store, 3, generation=2))
    first.close()


def test_a_version_that_is_given_up_leaves_nothing(fleet, store, published):
    model, first = serving(store, rank=4)
    staged = rekindle_torch.stage(model, "staged", 2, reserve_bytes=0,
                                  **options(store, 4, generation=1))
    staged.close()
    staged.close()
    with pytest.raises(rk.StaleError, match="given up"):
        staged.switch()
    assert has(model, 1) and ready(fleet, store, "st-4")
    with rekindle_torch.stage(model, "staged", 3, reserve_bytes=0,
                              **options(store, 4, generation=1)) as later:
        later.switch().close()
    assert has(model, 3)
    first.close()


def test_what_does_not_fit_is_refused_before_it_is_staged(fleet, store, published):
    model, first = serving(store, rank=5)
    wrong = {**weights(2), "layers.3": torch.zeros(3, 700)}
    rk.publish(wrong, "staged@50", agent=store)
    with pytest.raises(rk.InvalidError, match=r"layers\.3"):
        rekindle_torch.stage(model, "staged", 50, **options(store, 5, generation=1))
    assert has(model, 1) and ready(fleet, store, "st-5")
    first.close()


def test_a_staged_session_must_take_its_rank_before_it_loads(fleet, store, published):
    session = rk.attach("staged", 1, staged=True, **options(store, 6))
    session.stage(0, PATIENCE_S)
    model = Model()
    session.load_into(model)
    with pytest.raises(rk.InvalidError, match="rk_begin_switch"):
        session.commit(1.0)
    assert not ready(fleet, store, "st-6")
    session.close()
    session = rk.attach("staged", 1, staged=True, **options(store, 6))
    session.stage(0, PATIENCE_S)
    session.begin_switch()
    session.begin_switch()  # a second time changes nothing
    session.load_into(model)
    session.commit(PATIENCE_S)
    assert has(model, 1) and ready(fleet, store, "st-6")
    session.close()


def test_ranks_that_switch_to_other_versions_are_refused(fleet, store, published):
    ranks = []
    for rank, version in ((0, 2), (1, 3)):
        session = rk.attach("staged", version, staged=True, agent=store, instance="pair", world=2,
                            rank=rank, generation=7)
        session.stage(0, PATIENCE_S)
        ranks.append(session)
    ranks[0].begin_switch()
    with pytest.raises(rk.InvalidError, match=r"is at staged@2, rank 1 switches to staged@3"):
        ranks[1].begin_switch()
    for session in ranks:
        session.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_staged_session_that_has_ended_is_loaded_in_the_pause(fleet, published, how):
    store = fleet.store("b")
    model, first = serving(store, rank=7)
    staged = rekindle_torch.stage(model, "staged", 2, reserve_bytes=0,
                                  **options(store, 7, generation=1))
    assert staged.wait(PATIENCE_S) and staged.reason is None
    fleet.kill_agent("b", how)
    fleet.start_agent("b")
    assert has(model, 1)
    second = staged.switch()
    assert has(model, 2) and ready(fleet, store, "st-7")
    assert "agent" in staged.reason
    first.close()
    second.close()


class Gone:
    """A session of which every byte is here, and whose end is known at the switch."""

    def __init__(self, why):
        self.why, self.closed = why, False

    def check_stage(self, reserve):
        pass

    def stage(self, reserve, timeout):
        pass

    def begin_switch(self):
        raise self.why

    def close(self):
        self.closed = True


def staged_of(session, mode):
    """A staged version whose staged session is this one, and the attaches that it has made."""
    attached = []

    def attach(staged):
        attached.append(staged)
        return session if staged else "loads in the pause"

    return Staged(attach, Staging(mode), PATIENCE_S, Phases()), attached


@pytest.mark.parametrize("error", [rk.StaleError, rk.PeerLostError, rk.TimeoutError,
                                   rk.UnavailableError, rk.CorruptError])
def test_whatever_ended_the_staged_session_auto_attaches_again(error):
    session = Gone(error("it is over"))
    staged, attached = staged_of(session, "auto")
    assert staged.take() == "loads in the pause"
    assert attached == [True, False] and session.closed
    assert staged.reason == "it is over"


@pytest.mark.parametrize("staging", ["auto", "require"])
def test_a_refused_switch_is_an_error_and_not_a_load(staging):
    session = Gone(rk.InvalidError("other ranks switch to another version"))
    staged, attached = staged_of(session, staging)
    with pytest.raises(rk.InvalidError, match="other ranks"):
        staged.take()
    with pytest.raises(rk.StaleError, match="given up .other ranks"):
        staged.take()
    assert attached == [True] and session.closed


def test_what_must_be_staged_is_never_loaded_in_the_pause():
    session = Gone(rk.StaleError("it is over"))
    staged, attached = staged_of(session, "require")
    with pytest.raises(rk.StaleError, match="it is over"):
        staged.take()
    with pytest.raises(rk.StaleError, match="given up"):
        staged.take()
    assert attached == [True] and session.closed


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from test_staging import Model, options, serving
from rekindle import torch as rekindle_torch
store = sys.argv[1]
model, first = serving(store, rank=9)
staged = rekindle_torch.stage(model, "staged", 2, staging="require", reserve_bytes=0,
                              **options(store, 9, generation=1))
assert staged.wait(60)
print("staged", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_is_killed_while_it_stages_comes_back_and_updates(fleet, store, published):
    child = subprocess.Popen([sys.executable, "-c", CHILD, store, os.path.dirname(__file__)],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "staged\n"
    assert ready(fleet, store, "st-9")
    child.send_signal(signal.SIGKILL)
    child.wait(PATIENCE_S)
    eventually(lambda: not ready(fleet, store, "st-9"))
    model, first = serving(store, rank=9)
    assert has(model, 1) and ready(fleet, store, "st-9")
    with rekindle_torch.stage(model, "staged", 2, staging="require", reserve_bytes=0,
                              **options(store, 9, generation=2)) as staged:
        second = staged.switch()
    assert has(model, 2)
    first.close()
    second.close()
    child.stdin.close()
    child.stdout.close()


class Member(threading.Thread):
    """Serves version 1, and stages and switches to the version that an update brings."""

    def __init__(self, rank, store):
        super().__init__(daemon=True)
        self.rank, self.store = rank, store
        self.serves = threading.Event()
        self.failed = self.session = None
        self.untouched = False

    def run(self):
        try:
            where = {**options(self.store, device=f"double:{self.rank}",
                               instance=f"group-{self.rank}"), "group": "stagers"}
            model = Model()
            first = rekindle_torch.load(model, "staged", 1, **where)
            first.commit(PATIENCE_S)
            self.serves.set()
            version = first.wait_for_update(PATIENCE_S)
            with rekindle_torch.stage(model, "staged", version, staging="require", reserve_bytes=0,
                                      **{**where, "generation": 1}) as staged:
                assert staged.wait(PATIENCE_S)
                self.untouched = has(model, 1)
                self.session = staged.switch()
            assert has(model, 2)
            first.close()
        except BaseException as why:
            self.failed = why


def test_an_update_reports_the_phases_of_its_ranks(fleet, store, published):
    members = [Member(rank, store) for rank in range(2)]
    for member in members:
        member.start()
    for member in members:
        assert member.serves.wait(PATIENCE_S) and member.failed is None, member.failed
    result = rk.update("staged@2", group="stagers", gather=PATIENCE_S, timeout=PATIENCE_S,
                       agent=store)
    for member in members:
        member.join(PATIENCE_S)
        assert not member.is_alive() and member.failed is None, member.failed
        assert member.untouched
    assert (result.members, result.ready, result.by_broadcast) == (2, 2, 2)
    assert list(result.phases) == ["declare", "copy", "spread", "verify", "apply", "resume"]
    for phase in result.phases.values():
        assert phase.slowest.startswith(("rank 0 of group-0 on", "rank 0 of group-1 on"))
        assert 0 <= phase.median <= phase.p95 == phase.slowest_time
    told = fleet.run("status", "--coordinator", fleet.coordinator)["rounds"]
    last, = [one for one in told if one["group"] == "stagers"]
    assert [phase["phase"] for phase in last["phases"]] == list(result.phases)
    assert all(set(one["phases_us"]) == set(result.phases) for one in last["members"])
    for member in members:
        member.session.close()


def spans_of_ranks(fleet, subject, count):
    """The ranks of an update, each with the beginning and the end of its phases, in microseconds."""
    def recorded():
        done = subprocess.run([BINARY, "trace", subject, "--coordinator", fleet.coordinator], capture_output=True,
                              text=True, timeout=PATIENCE_S, env=fleet.environment)
        spans = [event for event in json.loads(done.stdout)["traceEvents"] if event["ph"] == "X"] if done.stdout else []
        ranks = [span for span in spans if span["name"] == "rank"]
        return len(ranks) == count and (spans, ranks)

    spans, ranks = eventually(recorded)
    return [(rank, {span["name"]: (span["ts"], span["ts"] + span["dur"]) for span in spans
                    if span["args"].get("parent") == rank["args"]["span"]}) for rank in ranks]


def test_the_spans_of_an_update_stand_where_its_phases_took_place(fleet, store, published):
    """Of the update above."""
    rounding = 2  # microseconds
    for rank, phases in spans_of_ranks(fleet, "staged@2", 2):
        assert "rekindle.phase_starts" not in rank["args"]
        assert set(phases) == {"declare", "copy", "spread", "verify", "apply", "resume"}
        # The copy began in a thread of its own before the declaration had ended.
        assert phases["declare"][0] <= phases["copy"][0] <= phases["declare"][1]
        assert phases["copy"][1] <= phases["apply"][0] + rounding
        assert phases["apply"][1] <= phases["resume"][0] + rounding
        assert phases["spread"][0] <= phases["verify"][0]
        assert rank["ts"] == min(begin for begin, _ in phases.values())


class Untimed(Member):
    """Reports durations only, as workers of 0.1.0 do."""

    def run(self):
        try:
            where = {**options(self.store, device="double:5", instance="old"), "group": "old"}
            model = Model()
            first = rekindle_torch.load(model, "staged", 2, **where)
            first.commit(PATIENCE_S)
            self.serves.set()
            version = first.wait_for_update(PATIENCE_S)
            first.close()
            self.session = rekindle_torch.load(model, "staged", version, **{**where, "generation": 1})
            self.session.report_phases({"apply": 0.25})
            self.session.commit(PATIENCE_S)
            self.session.report_phases({"apply": 0.25, "resume": 0.5})
        except BaseException as why:
            self.failed = why


def test_the_phases_of_an_older_worker_follow_each_other_and_are_marked(fleet, store, published):
    member = Untimed(0, store)
    member.start()
    assert member.serves.wait(PATIENCE_S) and member.failed is None, member.failed
    rk.update("staged@1", group="old", gather=PATIENCE_S, timeout=PATIENCE_S, agent=store)
    member.join(PATIENCE_S)
    assert not member.is_alive() and member.failed is None, member.failed
    (rank, phases), = spans_of_ranks(fleet, "staged@1", 1)
    assert rank["args"]["rekindle.phase_starts"] == "unknown"
    (begin, end), (after, _) = phases["apply"], phases["resume"]
    assert end - begin == pytest.approx(250_000) and after == pytest.approx(end)
    with pytest.raises(rk.InvalidError, match="began: resume"):
        member.session.report_phases({"apply": 0.25, "resume": 0.5}, {"apply": 1})
    with pytest.raises(rk.InvalidError, match="lunch|unknown name"):
        member.session.report_phases({"lunch": 0.25}, {"lunch": 1})
    member.session.close()
