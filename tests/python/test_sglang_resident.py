"""Models of SGLang that outlive their worker: processes with a small stand-in for SGLang, real
agents and keepers, and doubles of a GPU."""
import json
import pathlib
import subprocess
import sys

import pytest
import torch

import rekindle as rk
from test_resident import residents

WORKER = pathlib.Path(__file__).with_name("sglang_resident_process.py")


@pytest.fixture(autouse=True)
def published(rekindle):
    made = {}
    for version in (1, 2):
        made[version] = torch.randn(400, 300, generator=torch.Generator().manual_seed(version))
        rk.publish({"w": made[version]}, f"sgr@{version}", agent=rekindle.store("a"))
    yield made
    rekindle.run("release", "sgr", "--store", rekindle.store("a"))


def crashed(rekindle, *orders, **options):
    """What a worker says before it is killed."""
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(rekindle.store("a")), json.dumps(options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for order in (*orders, None):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            if order is not None:
                process.stdin.write(order + "\n")
                process.stdin.flush()
        return json.loads(line)
    finally:
        process.kill()
        process.communicate()


def check(said, weights):
    part = weights[200:]
    assert said["part"] == float(part.double().sum())
    assert said["doubled"] == float((part * 2).double().sum())
    assert said["rows"] == 200 and said["scale"] == [1, 1] and not said["training"]


def test_a_successor_neither_loads_nor_post_processes(rekindle, published):
    first = crashed(rekindle)
    check(first, published[1])
    assert first["kept"] and first["rung"] == "local" and first["steps"] == ["postprocess"]
    assert first["preloaded"] == 0, first["warned"]
    second = crashed(rekindle)
    check(second, published[1])
    assert second["rung"] == "resident" and second["kept"] and not second["warned"]
    assert second["steps"] == [] and second["preloaded"] >= 2 * 200 * 300 * 4


def test_an_update_from_disk_is_kept(rekindle, published):
    updated = crashed(rekindle, "update")
    check(updated, published[2])
    assert updated["kept"], updated["warned"]
    successor = crashed(rekindle, version=2)
    check(successor, published[2])
    assert successor["rung"] == "resident" and successor["steps"] == []


def test_an_update_by_name_is_not_kept(rekindle, published):
    """SGLang post-processes when Rekindle is no longer called."""
    assert not crashed(rekindle, "by-name")["kept"]
    assert not residents(rekindle)


def test_other_arguments_of_the_server_load(rekindle, published):
    crashed(rekindle)
    said = crashed(rekindle, arguments={"moe_runner_backend": "triton"})
    assert said["rung"] == "local" and said["steps"] == ["postprocess"]


@pytest.mark.parametrize("argument", ["enable_eplb", "enable_memory_saver", "cpu_offload_gb"])
def test_what_moves_or_frees_weights_is_refused_with_a_reason(rekindle, published, argument):
    said = crashed(rekindle, arguments={argument: 1})
    check(said, published[1])
    assert not said["kept"] and "is not resident" in said["warned"][0]
