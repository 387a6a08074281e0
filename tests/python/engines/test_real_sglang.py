"""Load format rekindle under the real SGLang, on the CPU: every parameter bit-identical to what
SGLang's own loader makes of the same checkpoint, at the start and after its own updates."""
import os
import pathlib
import socket
import threading

import pytest

import rekindle as rk

from . import models
from .models import llama, qwen3_moe, without
from .processes import run_ranks

HERE = pathlib.Path(__file__).parent
PATIENCE_S = 300  # SGLang takes a while to import


def deepseek_v3():
    """With what SGLang's own code needs of its configuration."""
    return models.deepseek_v3(
        moe_layer_freq=1, scoring_func="sigmoid", rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 32})


MODELS = {"llama": llama, "llama-tied": lambda: llama(True),
          "qwen3-moe": lambda: qwen3_moe(tied=False), "deepseek-v3": deepseek_v3}


@pytest.fixture(scope="module")
def checkpoints(rekindle, memory_directory):
    return models.published(rekindle, memory_directory, MODELS)


def run_sglang(rekindle, path, options, world=1, **job):
    """What each rank says."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    options = {"agent": str(rekindle.store("a")), **options}
    jobs = [{"path": str(path), "world": world, "rank": rank, "meeting": meeting,
             "options": options, **job} for rank in range(world)]
    return [{**said, "log": log} for said, log in run_ranks(
        HERE / "sglang_worker.py", jobs, dict(os.environ), PATIENCE_S)]


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_has_what_sglangs_own_loader_gives(rekindle, checkpoints, name):
    """By recorded slices, and from whole tensors. DeepSeek's loader computes from what it loads."""
    said, = run_sglang(rekindle, checkpoints[name, 1], {"model": name, "version": 1},
                       also=[{"record": False}])
    assert said.get("differ") == [], said
    assert said["also"][0]["differ"] == []
    assert said["recorded"] == (name != "deepseek-v3") and not said["also"][0]["recorded"]


@pytest.mark.parametrize("experts", [1, 2])
def test_of_two_ranks_each_fetches_its_half_and_they_update_together(
        rekindle, checkpoints, experts):
    name = "qwen3-moe"
    said = run_sglang(
        rekindle, checkpoints[name, 1], {"model": name, "version": 1, "instance": f"tp2-{experts}"},
        world=2, experts=experts, also=[{"record": False, "instance": f"whole-{experts}"}],
        updates=[{"how": "disk", "path": str(checkpoints[name, 2])}])
    assert [one.get("differ") for one in said] == [[], []], said
    assert said[0]["generation"] == said[1]["generation"] > 0
    for one in said:
        assert one["bytes"] < 0.7 * one["also"][0]["bytes"]
        update, = one["updates"]
        assert update["differ"] == [] and update["version"] == 2, update
        assert update["answer"][0] and update["bytes"] == one["bytes"]
    assert len({one["updates"][0]["generation"] for one in said}) == 1
    assert said[0]["updates"][0]["generation"] > said[0]["generation"]
    if experts == 2:
        found = [{n.split(".")[5] for n in one["names"] if ".experts." in n} for one in said]
        assert found == [set("0123"), set("4567")]


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def publish_torn(rekindle, checkpoints, directory, name):
    """A version of llama without one of the three parts of a fused parameter."""
    rekindle.publish(name, without(checkpoints["llama", 2], K_PROJ,
                                   directory / name.replace("@", "-")))


TORN = "model.layers.1.self_attn.qkv_proj.weight (5120 of 6144 elements written)"


def test_a_running_model_is_updated_in_both_ways(rekindle, checkpoints, memory_directory):
    """From disk's place, then by name; one that lacks a tensor is an error, and the next one is
    taken again."""
    publish_torn(rekindle, checkpoints, memory_directory, "torn@1")
    first, later = (str(checkpoints["llama", version]) for version in (1, 2))
    said, = run_sglang(
        rekindle, first, {"model": "llama", "version": 1, "instance": "updated"},
        updates=[{"how": "disk", "path": later},
                 {"how": "tensor", "version": ["llama", 1], "path": first},
                 {"how": "tensor", "version": ["torn", 1]},
                 {"how": "tensor", "version": ["llama", "latest"], "path": later}])
    assert "error" not in said, (said["error"], said["log"])
    disk, named, torn, again = said["updates"]
    for update, version in ((disk, 2), (named, 1), (again, 2)):
        assert update["answer"][0] and update["differ"] == [] and update["torn"] is None, update
        assert update["version"] == version and update["instance"] == "updated"
    generations = [one["generation"] for one in (said, disk, named, again)]
    assert sorted(set(generations)) == generations
    kind, text = torn["error"]
    assert kind == "InvalidError" and TORN in text and "must not serve" in text
    assert TORN in torn["torn"] and torn["version"] == 1  # what the fleet is told


def test_after_an_update_from_disk_that_fails_the_version_of_before_is_back(
        rekindle, checkpoints, memory_directory):
    rekindle.publish("breaks@1", checkpoints["llama", 1])
    publish_torn(rekindle, checkpoints, memory_directory, "breaks@2")
    first = str(checkpoints["llama", 1])
    said, = run_sglang(rekindle, first, {"model": "breaks", "version": 1},
                       also=[{"record": False}], updates=[{"how": "disk", "path": first}])
    assert "error" not in said, (said["error"], said["log"])
    update, = said["updates"]
    done, text = update["answer"]
    assert not done and TORN in text and "must not serve" in text
    assert update["differ"] == [] and update["version"] == 1 and update["torn"] is None


@pytest.mark.parametrize("record", [True, False])
def test_a_parameter_that_no_tensor_is_for_is_an_error_that_names_it(
        rekindle, checkpoints, memory_directory, record):
    name = f"holes-{record}"
    publish_torn(rekindle, checkpoints, memory_directory, f"{name}@1")
    said, = run_sglang(rekindle, checkpoints["llama", 1], {"model": name, "record": record})
    kind, text = said["error"]
    assert kind == "InvalidError" and TORN in text


def test_the_own_loader_takes_over_only_when_asked_to(rekindle, checkpoints):
    path = checkpoints["llama", 1]
    options = {"model": "nobody-has-it", "attach_timeout": 0.5}
    said = run_sglang(rekindle, path, options, world=2)
    assert {one["error"][0] for one in said} <= {"NotFoundError", "TimeoutError"}, said
    said = run_sglang(rekindle, path, {**options, "fallback": "default"}, world=2)
    assert [one.get("differ") for one in said] == [[], []], said


def test_its_checkpoint_engine_worker_takes_a_version(rekindle, checkpoints):
    """What `--checkpoint-engine-wait-weights-before-ready` waits for: SGLang's worker and
    checkpoint-engine's receiver, fed by our sender."""
    pytest.importorskip("checkpoint_engine")
    from rekindle.compat import checkpoint_engine as ce
    sent = []

    def send(address):
        with rk.attach("qwen3-moe", 2, device="double:0", agent=rekindle.store("a")) as session:
            sent.append(ce.send(session, address, "double:0", timeout=PATIENCE_S))

    with ce.channel.private_directory() as directory:
        sender = threading.Thread(target=send, args=(f"ipc://{directory}/0.sock",))
        sender.start()
        said, = run_sglang(
            rekindle, checkpoints["qwen3-moe", 1], {"model": "qwen3-moe", "version": 1},
            updates=[{"how": "ipc", "address": f"ipc://{directory}/0.sock",
                      "path": str(checkpoints["qwen3-moe", 2])}])
        sender.join(PATIENCE_S)
    update, = said["updates"]
    assert update["answer"][0] and update["differ"] == [], said
    assert sent and not sender.is_alive()
