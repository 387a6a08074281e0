"""`rekindle switch` and models that take turns on a double of a GPU: real agents, keepers and workers."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import BINARY, PATIENCE_S, Rekindle, eventually
from test_resident import agent_log, events, keeper_of, residents

import rekindle
from rekindle.torch import Models, turns

WORKER = pathlib.Path(__file__).with_name("switch_process.py")
DEVICE = "double:0"
SEEDS = {("a", 1): 1, ("a", 2): 2, ("b", 1): 3, ("c", 1): 4, ("misfit", 1): 5}


def weights(name, version):
    generator = torch.Generator().manual_seed(SEEDS[name, version])
    rows, columns = (17, 40) if name in ("c", "misfit") else (64, 300)
    made = {"first.weight": (rows, columns), "first.bias": (rows,), "norm.weight": (columns,), "norm.bias": (columns,),
            "scale": (5,)}
    return {key: torch.randn(shape, generator=generator) for key, shape in made.items()}


@pytest.fixture
def fleet(memory_directory, request):
    directory = memory_directory / f"{abs(hash(request.node.name)):x}"
    directory.mkdir()
    running = Rekindle(directory)
    for name, version in SEEDS:
        rekindle.publish(weights(name, version), f"{name}@{version}", agent=running.store("a"))
    yield running
    running.close()
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(keeper_of(running), signal.SIGKILL)


class Worker:
    def __init__(self, fleet, first="a@1", device=DEVICE, **options):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(fleet.store("a")), device, *first.split("@")[:1],
             json.dumps({"instance": "i", **options})],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def switch(fleet, what, *more, instance="i", code=0):
    done = subprocess.run([BINARY, "switch", instance, what, "--store", str(fleet.store("a")), "--json", *more],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
                          env=fleet.environment)
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stderr
    answer = json.loads(done.stdout)
    if done.returncode == 0:
        return answer
    # One line on stderr, and the same in the JSON.
    assert done.stderr.count("\n") == 1, done.stderr
    return answer["error"]["message"]


def instance_of(fleet):
    """As the agent knows it; {}: not at all."""
    found = fleet.run("status", "--store", fleet.store("a"))["instances"]
    return found[0] if found else {}


def check(answer, name, version=1):
    known = weights(name, version)
    total = sum(float(value.double().sum()) for value in known.values())
    total += sum(float(known[f"norm.{key}"].double().sum()) for key in ("weight", "bias"))  # `tied`
    assert (answer["name"], answer["version"], answer["sum"]) == (name, version, total)
    assert answer["first"] == known["first.weight"][3, :4].tolist()
    assert answer["mask"] == [float(len(name))] * 3 and answer["tied"]
    assert not answer["warned"]


@pytest.mark.parametrize("resident", [False, True])
def test_models_take_turns_and_the_bytes_are_right_every_time(fleet, resident):
    with Worker(fleet, resident=resident) as worker:
        check(worker.ready, "a", 2)
        for name in ("b", "c", "a", "c", "b", "a"):
            answer = switch(fleet, f"{name}@1")
            assert (answer["model"], answer["version"], answer["ranks"]) == (name, 1, 1)
            assert list(answer["phases_us"]) == ["drain", "free", "load", "ready"]
            told = worker.answer()
            check(told, name)
            if name != "c":
                assert told["at"] == worker.ready["at"]
            fleet.run("wait-ready", "i", "--store", fleet.store("a"))
            if resident:
                assert eventually(lambda: [copy["id"] for copy in residents(fleet)] == [f"{name}@1"])
        assert told["drained"] == ["a", "b", "c", "a", "c", "b"]
        assert len(events(fleet, "switched")) == 6
        instance = instance_of(fleet)
        assert instance["instance"] == "i" and instance["state"] == "COMMITTED"


def test_without_a_version_it_is_the_newest_and_again_changes_nothing(fleet):
    with Worker(fleet, "b") as worker:
        assert switch(fleet, "a")["version"] == 2
        check(worker.answer(), "a", 2)
        assert switch(fleet, "a@2")["phases_us"] == {}
        switch(fleet, "a@1")
        check(worker.answer(), "a", 1)


def test_what_cannot_be_served_is_refused_and_the_worker_goes_on(fleet):
    with Worker(fleet) as worker:
        assert "no worker of instance 'other'" in switch(fleet, "b@1", instance="other", code=3)
        assert "rekindle pull b@7" in switch(fleet, "b@7", code=3)
        rekindle.publish(weights("c", 1), "d@1", agent=fleet.store("a"))
        refused = switch(fleet, "d@1", code=3)
        assert "this worker has no model d" in refused and "i serves a@2" in refused
        assert switch(fleet, "b@1", "--timeout", "0s", code=2)
        switch(fleet, "b@1")
        check(worker.answer(), "b")


def test_a_model_that_does_not_fit_leaves_the_one_that_serves(fleet):
    with Worker(fleet, models=["a", "misfit"]) as worker:
        failed = switch(fleet, "misfit@1", code=2)
        assert "has shape" in failed and "i serves a@2" in failed
        assert events(fleet, "not_switched")
        switch(fleet, "a@1")
        check(worker.answer(), "a", 1)


def test_a_parameter_that_got_other_memory_is_named(fleet):
    with Worker(fleet, rebinds="b") as worker:
        assert "first.weight of b has other memory" in switch(fleet, "b@1", code=2)
        switch(fleet, "c@1")
        check(worker.answer(), "c")


def test_wrong_bytes_bring_the_worker_back_to_what_it_served(fleet):
    """Nobody else has the version, so its copy cannot be mended."""
    with Worker(fleet) as worker:
        (copy,) = (found for found in fleet.run("status", "--store", fleet.store("a"))["copies"]
                   if (found["model"], found["version"]) == ("b", 1))
        segment = max(pathlib.Path(copy["directory"]).rglob("*"), key=lambda path: path.stat().st_size)
        os.chmod(segment, 0o600)
        with open(segment, "r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
        # Its agent notices before the attach, or while the worker reads.
        failed = switch(fleet, "b@1", "--timeout", "60s", code=(3, 5))
        assert "i serves a@2" in failed
        check(worker.answer(), "a", 2)


def test_two_switches_at_once_are_one_after_the_other_or_refused(fleet):
    with Worker(fleet) as worker, concurrent.futures.ThreadPoolExecutor() as pool:
        def ask(name):
            done = subprocess.run([BINARY, "switch", "i", f"{name}@1", "--store", str(fleet.store("a")), "--json"],
                                  capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
            return name, done.returncode, done.stdout
        outcomes = list(pool.map(ask, ["b", "c"]))
        good = [name for name, code, _ in outcomes if code == 0]
        assert good
        for _, code, said in outcomes:
            assert code == 0 or "earlier order" in said or "LOADING" in said
        for _ in good:
            told = worker.answer()
        check(told, told["name"])
        assert told["name"] in good


def test_requests_that_do_not_end_leave_the_model_that_serves(fleet):
    with Worker(fleet, fails_at="a"):
        failed = switch(fleet, "b@1", code=5)
        assert "requests do not end" in failed and "i serves a@2" in failed


def test_a_worker_that_dies_in_the_middle_is_told_and_its_successor_switches(fleet):
    with Worker(fleet, dies_at="a"):
        failed = switch(fleet, "b@1", code=5)
        assert "rank 0 of i" in failed and "i is UNFIT" in failed
    with Worker(fleet, "b") as second:
        check(second.ready, "b")
        switch(fleet, "c@1")
        check(second.answer(), "c")


def test_a_worker_that_hangs_is_told_in_time(fleet):
    with Worker(fleet, hangs_at="a") as worker:
        assert "has not answered" in switch(fleet, "b@1", "--timeout", "1s", code=5)
        assert "earlier order" in switch(fleet, "b@1", code=5)
        worker.kill()
    with Worker(fleet) as second:
        switch(fleet, "b@1")
        check(second.answer(), "b")


def test_a_worker_that_takes_no_orders_is_told_in_time(fleet):
    with rekindle.attach("a", 1, agent=fleet.store("a"), instance="plain") as session:
        for _ in session:
            pass
        session.commit(PATIENCE_S)
        refused = switch(fleet, "b@1", "--timeout", "100ms", instance="plain", code=5)
        assert "takes no order" in refused and "nothing has changed" in refused
        with pytest.raises(rekindle.InvalidError):
            session.next_order(-1)
        assert session.next_order(0.01) is None, "the order was withdrawn"


def test_an_agent_that_is_killed_in_the_middle_costs_a_load_and_no_worker(fleet):
    with Worker(fleet) as worker:
        for name in ("b", "c"):
            asked = subprocess.Popen([BINARY, "switch", "i", f"{name}@1", "--store", str(fleet.store("a"))],
                                     env=fleet.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            assert eventually(lambda: "worker.order" in agent_log(fleet))
            fleet.kill_agent("a")
            asked.wait(PATIENCE_S)
            if name == "c":
                # The worker looks for it meanwhile, and does not find it.
                time.sleep(2)
            fleet.start_agent("a")
            assert eventually(lambda: instance_of(fleet).get("state") == "COMMITTED")
        # Whichever it serves now, it obeys.
        switch(fleet, "a@1")
        while (told := worker.answer())["name"] != "a" or told["version"] != 1:
            pass
        told["warned"] = []
        check(told, "a")


@contextlib.contextmanager
def ranks(fleet, **options):
    """Two workers of one instance. An option has a value for each."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        workers = list(pool.map(lambda rank: Worker(
            fleet, "b", device=f"double:{rank}", rank=rank, world=2,
            **{key: value[rank] for key, value in options.items()}), (0, 1)))
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def test_two_ranks_switch_together_and_go_back_together(fleet):
    with ranks(fleet, models=[["a", "b", "c"], ["a", "b"]]) as workers:
        for worker in workers:
            check(worker.ready, "b")
        answer = switch(fleet, "a@1")
        assert answer["ranks"] == 2
        for worker in workers:
            check(worker.answer(), "a")
        # Rank 1 has no model c, and rank 0 loads it in vain.
        failed = switch(fleet, "c@1", code=3)
        assert "rank 1 of i" in failed or "rank 0 of i" in failed
        for worker in workers:
            check(worker.answer(), "a")
        fleet.run("wait-ready", "i", "--store", fleet.store("a"))
        switch(fleet, "b@1")
        for worker in workers:
            check(worker.answer(), "b")


def test_two_ranks_go_back_together_when_requests_of_one_do_not_end(fleet):
    with ranks(fleet, fails_at=[None, "b"]) as workers:
        failed = switch(fleet, "a@1", code=5)
        assert "rank 1 of i" in failed and "requests do not end" in failed
        for worker in workers:
            check(worker.answer(), "b")
        fleet.run("wait-ready", "i", "--store", fleet.store("a"))


def test_a_rank_that_dies_in_a_switch_is_named_and_not_waited_for(fleet):
    with ranks(fleet, dies_at=[None, "b"]):
        failed = switch(fleet, "a@1", "--timeout", "1h", code=5)
        assert "rank 1 of i" in failed and "died" in failed


def test_a_successor_takes_over_the_model_that_served_last(fleet):
    with Worker(fleet, resident=True) as first:
        switch(fleet, "b@1")
        check(first.answer(), "b")
        assert eventually(lambda: [copy["id"] for copy in residents(fleet)] == ["b@1"])
    with Worker(fleet, "b", resident=True) as second:
        check(second.ready, "b")
        assert second.ready["rung"] == "resident"
        switch(fleet, "a@1")
        check(second.answer(), "a")


def test_a_resident_copy_with_other_places_is_not_taken(fleet):
    """Also if the keys should be equal."""
    with Worker(fleet, "b", resident=True, key="equal"):
        assert eventually(lambda: [copy["id"] for copy in residents(fleet)] == ["b@1"])
    with Worker(fleet, "b", resident=True, key="equal", norm_first=True) as second:
        assert "lie elsewhere" in second.ready["warned"].pop()
        check(second.ready, "b")
        assert second.ready["rung"] != "resident"
        assert eventually(lambda: [copy["id"] for copy in residents(fleet)] == ["b@1"])
    with Worker(fleet, "b", resident=True, key="equal", norm_first=True) as third:
        check(third.ready, "b")
        assert third.ready["rung"] == "resident"


def test_a_switch_to_the_newest_version_uses_what_was_prepared(fleet, monkeypatch):
    declared, declare = [], turns._declare
    monkeypatch.setattr(turns, "_declare", lambda *what: declared.append(what[1:3]) or declare(*what))
    with Models({name: torch.nn.Linear(40, 17) for name in "xy"}, device=DEVICE, agent=fleet.store("a")) as models:
        for name in "xy":
            rekindle.publish(torch.nn.Linear(40, 17).state_dict(), f"{name}@1", agent=fleet.store("a"))
        models.switch("x")
        models.prepare("y")
        assert declared == [("x", 1), ("y", 1)]
        models.switch("y")
        models.switch("x")
        assert len(declared) == 2
        rekindle.publish(torch.nn.Linear(40, 17).state_dict(), "y@2", agent=fleet.store("a"))
        models.switch("y")
        assert models.session.version == 2 and declared[2:] == [("y", 2)]


def test_no_resident_copy_is_taken_for_a_module_with_an_unsaved_buffer_on_meta(monkeypatch):
    """The copy has no bytes for it."""
    module = torch.nn.Linear(2, 3)
    module.register_buffer("mask", torch.empty(3, device="meta"), persistent=False)
    models = Models({"a": module}, device=DEVICE, resident=True)
    monkeypatch.setattr(turns.sessions, "attach", lambda *_, **__: pytest.fail("it attaches"))
    assert not models._take("a", 1)


def test_models_that_lack_tensors_are_refused():
    """Their memory has the bytes of another model."""
    with pytest.raises(rekindle.InvalidError, match="strict=False"):
        Models({"a": torch.nn.Linear(2, 3)}, device=DEVICE, strict=False)


def test_models_of_transformers_take_turns(fleet, tmp_path):
    """Their checkpoints have other names than the modules, and the modules have buffers that no checkpoint has."""
    transformers = pytest.importorskip("transformers")
    import transformers_models as known
    names = ("llama", "qwen3_moe")
    wanted = {}
    for name in names:
        model = known.build(name)
        wanted[name] = known.digest(model)
        model.save_pretrained(tmp_path / name)
        fleet.publish(f"{name}@1", tmp_path / name)

    def build(name):
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(known.config(name)).eval()

    with Models({name: build(name) for name in names}, device=DEVICE, agent=fleet.store("a")) as models:
        for name in (*names, *names):
            assert known.digest(models.switch(name)) == wanted[name]
        with pytest.raises(rekindle.NotFoundError, match="has no model other"):
            models.switch("other")
        assert known.digest(models.model) == wanted[names[-1]]
