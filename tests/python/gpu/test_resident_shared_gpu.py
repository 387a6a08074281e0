"""Workers on a GPU read one copy of their parameters, and one that writes to it ends alone.

    python -m pytest -s tests/python/gpu/test_resident_shared_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set.
REKINDLE_TEST_DEVICES=double runs them on a double.
"""
import os
import signal

import pytest
from conftest import PATIENCE_S, Rekindle, gpu_fleet
from test_resident import Worker, check, residents, weights

import rekindle as rk

DOUBLE = os.environ.get("REKINDLE_TEST_DEVICES") == "double"
DEVICE = "double:0" if DOUBLE else "cuda:0"
SHARED = {"device": DEVICE, "shared": True}


@pytest.fixture
def fleet(memory_directory):
    if DOUBLE:
        directory = memory_directory / "double"
        directory.mkdir(exist_ok=True)
        running = Rekindle(directory)
        with_versions(running)
        yield running
        running.close()
    else:
        with gpu_fleet(memory_directory, "shared resident copies have not run on CUDA") as running:
            with_versions(running)
            yield running


def with_versions(running):
    for version in (1, 2):
        rk.publish(weights(version), f"m@{version}", agent=running.store("a"))


def test_workers_share_a_copy_and_a_writer_ends_alone(fleet):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second:
        check(first.ready, rung="local")
        check(second.ready, rung="resident")
        second.process.stdin.write("scribble\nshow\n")
        second.process.stdin.flush()
        code, errors = second.process.wait(PATIENCE_S), second.process.stderr.read()
        assert code == -signal.SIGSEGV if DOUBLE else code != 0 and "CUDA error" in errors, errors
        check(first.tell("show"))
        with Worker(fleet, **SHARED) as third:
            check(third.ready, rung="resident")
            check(third.tell("update 2"), version=2)
            check(first.tell("show"))
            assert sorted(copy["id"] for copy in residents(fleet)) == ["m@1", "m@2"]
    with Worker(fleet, **SHARED) as successor:
        check(successor.ready, rung="resident")
