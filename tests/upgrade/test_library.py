"""Programs of the previous release run with this release's library."""
import pathlib
import shutil
import tempfile

import pytest
from fleet import NEW, OLD, Fleet, Release, digest_of_directory, eventually, make_checkpoint


@pytest.fixture(scope="module")
def fleet():
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-upgrade.", dir="/dev/shm"))
    made = Fleet(directory)
    made.start_coordinator(NEW)
    made.start_agent(NEW, "a")
    made.publish(NEW, "m@1", make_checkpoint(directory / "m", 1, 64), "a")
    yield made
    made.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("device", [[], ["double:0"]], ids=["memory", "device"])
def test_its_python_package_attaches(fleet, device):
    mixed = Release("old package, new library", OLD.source, NEW.build)
    worker = fleet.start_worker(mixed, "a", "m", *device)
    line = eventually(lambda: worker.lines() or worker.fail_if_ended(), worker.said)[0]
    assert line["digest"] == digest_of_directory(fleet.directory / "m")
    assert line["device_path"] == ("ipc" if device else "")
    assert line["library"] == fleet.command(NEW, "version")["version"]
    worker.stop()


def test_its_program_in_c_attaches(fleet):
    environment = [f"LD_PRELOAD={NEW.build}/src/client/librekindle.so.1", f"REKINDLE_STORE={fleet.store('a')}",
                   "REKINDLE_MODEL=m"]
    worker = fleet.start(OLD, "c-worker", ["env", *environment, OLD.build / "bin/example_worker"])
    eventually(lambda: worker.has_line("ready: m@1, ") or worker.fail_if_ended(), worker.said)
    worker.stop()
