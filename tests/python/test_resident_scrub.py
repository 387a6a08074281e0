"""GPU memory that goes wrong under parameters that outlive their worker, on doubles of a GPU."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import urllib.request

import pytest

import rekindle
from conftest import PATIENCE_S, Rekindle, eventually
from test_resident import DEVICE, Worker, check, events, keeper_of, residents, total, weights

MIB = 1 << 20
# Where parts of the module lie in its only block, in the order of the module.
FIRST_WEIGHT = 12
SECOND_WEIGHT = MIB + 8
# The tensors with bytes in each MiB.
IN_MIB = (["first.weight", "first.bias", "second.weight"],
          ["second.weight", "norm.weight", "norm.bias", "scale"])
SAID = [f"{DEVICE}: {', '.join(names)} (MiB {number})" for number, names in enumerate(IN_MIB)]


@contextlib.contextmanager
def fleet_that_scrubs(directory, every):
    class Other(Rekindle):
        def _daemon(self, role, *arguments):
            more = ("--resident-scrub", every, "--metrics", "127.0.0.1:0") if role == "agent" else ()
            return super()._daemon(role, *arguments, *more)

    directory.mkdir()
    running = Other(directory)
    try:
        for version in (1, 2):
            rekindle.publish(weights(version), f"m@{version}", agent=running.store("a"))
        yield running
    finally:
        running.close()
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(keeper_of(running), signal.SIGKILL)


@pytest.fixture
def fleet(memory_directory, request):
    name = f"{abs(hash(request.node.name)):x}"
    with fleet_that_scrubs(memory_directory / name, "200ms") as running:
        yield running


def blocks_of(fleet):
    """The memory files of the keeper's only copy."""
    directory = pathlib.Path(f"/proc/{keeper_of(fleet)}/fd")
    return [path for path in sorted(directory.iterdir(), key=lambda path: int(path.name))
            if "memfd" in os.readlink(path)]


def flip(fleet, *offsets, block=0):
    """Flips a bit at each place, as memory does: no process has written there."""
    with open(blocks_of(fleet)[block], "r+b", buffering=0) as file:
        for offset in offsets:
            (before,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([before ^ 4]), offset)


def why(fleet, kind):
    return [event["why"] for event in events(fleet, kind)]


def instance(fleet, name="i"):
    (found,) = [one for one in fleet.run("status", "--store", fleet.store("a"))["instances"]
                if one["instance"] == name]
    return found


def metric(fleet, name):
    address = next(ready["metrics"] for ready in fleet.ready if "metrics" in ready)
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S).read().decode()
    return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])


def test_the_status_says_when_a_copy_was_read(fleet):
    with Worker(fleet):
        first = eventually(lambda: residents(fleet)[0]["read_unix_us"])
        assert eventually(lambda: residents(fleet)[0]["read_unix_us"] > first)
        assert not why(fleet, "resident_damaged")


def test_a_worker_that_watches_has_a_flipped_bit_mended_between_two_steps(fleet):
    with Worker(fleet, instance="i") as worker:
        worker.tell("watch")
        flip(fleet, FIRST_WEIGHT)
        assert worker.tell("step") == {"kind": "mend", "tensors": IN_MIB[0]}
        check(worker.tell("watch"))
        assert why(fleet, "resident_damaged") == why(fleet, "resident_mended") == [SAID[0]]
        assert [copy["users"] for copy in residents(fleet)] == [1]
        assert instance(fleet)["state"] == "COMMITTED"


def test_two_flipped_bits_are_mended_together(fleet):
    with Worker(fleet) as worker:
        worker.tell("watch")
        flip(fleet, FIRST_WEIGHT, SECOND_WEIGHT)
        worker.tell("step")
        if len(why(fleet, "resident_mended")) < 2:
            # The scrub has read the block between the two.
            worker.tell("step")
        check(worker.tell("watch"))
        assert len(why(fleet, "resident_mended")) == 2


def test_a_worker_that_watches_for_no_orders_fails_and_the_next_one_loads(fleet):
    with Worker(fleet, instance="i") as worker:
        flip(fleet, FIRST_WEIGHT)
        assert eventually(lambda: instance(fleet)["state"] == "UNFIT")
        assert "GPU memory went wrong in first.weight, first.bias, second.weight (MiB 0)" in instance(fleet)["why"]
        assert not residents(fleet)
        worker.kill()
    with Worker(fleet, instance="i") as worker:
        check(worker.ready, rung="local")


def test_a_worker_that_does_not_agree_fails(fleet):
    with Worker(fleet, instance="i") as worker:
        worker.tell("watch")
        flip(fleet, FIRST_WEIGHT)
        worker.tell("step-unmended")
        assert eventually(lambda: instance(fleet)["state"] == "UNFIT")
        assert "it cannot pause" in instance(fleet)["why"]
        assert not residents(fleet)


def test_a_copy_without_a_worker_is_mended_without_asking(fleet):
    with Worker(fleet):
        pass
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [0])
    flip(fleet, SECOND_WEIGHT)
    assert eventually(lambda: why(fleet, "resident_mended") == [SAID[1]])
    with Worker(fleet) as worker:
        check(worker.ready, rung="resident")


def test_bytes_that_this_host_does_not_have_are_not_mended(fleet):
    with Worker(fleet, instance="i") as worker:
        worker.tell("watch")
        # Behind the last tensor.
        flip(fleet, os.stat(blocks_of(fleet)[0]).st_size - 1)
        worker.process.stdin.write("step\n")
        worker.process.stdin.flush()
        assert eventually(lambda: instance(fleet)["state"] == "UNFIT")
        assert "cannot be mended" in instance(fleet)["why"]
        assert not residents(fleet) and not why(fleet, "resident_mended")


def test_a_dead_workers_copy_with_such_bytes_is_dropped(fleet):
    with Worker(fleet):
        pass
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [0])
    flip(fleet, os.stat(blocks_of(fleet)[0]).st_size - 1)
    assert eventually(lambda: not residents(fleet))
    assert "was changed after its seal" in why(fleet, "resident_dropped")[-1]
    with Worker(fleet) as worker:
        check(worker.ready, rung="local")


def test_what_the_model_writes_by_itself_is_not_compared(fleet):
    with Worker(fleet, instance="i", resident_changes=["scale", r"first\..*"]) as worker:
        worker.tell("watch")
        # They lie in a block of their own.
        flip(fleet, FIRST_WEIGHT, block=1)
        passes = metric(fleet, "rekindle_resident_scrub_passes_total")
        assert eventually(lambda: metric(fleet, "rekindle_resident_scrub_passes_total") > passes + 1)
        assert not why(fleet, "resident_damaged")
        flip(fleet, FIRST_WEIGHT)
        assert worker.tell("step")["tensors"] == ["second.weight", "norm.weight", "norm.bias"]
    # The hand-over compares the others, too.
    with Worker(fleet, instance="i", resident_changes=["scale", r"first\..*"]) as worker:
        assert worker.ready["rung"] == "resident"


def test_updates_during_the_scrub_are_no_damage(memory_directory):
    with fleet_that_scrubs(memory_directory / "updates", "1ms") as fleet, Worker(fleet) as worker:
        for version in (2, 1) * 4:
            check(worker.tell(f"update {version}"), version=version)
        assert eventually(lambda: metric(fleet, "rekindle_resident_scrub_passes_total") > 3)
        assert not why(fleet, "resident_damaged")
        assert [copy["users"] for copy in residents(fleet)] == [1]


def test_a_device_process_that_ends_is_waited_for(fleet):
    with Worker(fleet) as worker:
        worker.tell("watch")
        pid = fleet.run("status", "--store", fleet.store("a"))["devices"]["pid"]
        os.kill(pid, signal.SIGKILL)
        flip(fleet, FIRST_WEIGHT)
        assert worker.tell("step")["tensors"] == IN_MIB[0]
        check(worker.tell("watch"))


def test_a_copy_that_its_gpu_cannot_read_is_dropped(fleet):
    """Each such read ends the device process, which serves all GPUs."""
    with Worker(fleet):
        pass
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [0])
    fleet.kill_agent("a")
    fleet.environment = {**fleet.environment, "REKINDLE_FAILPOINTS": "device.check=error:EIO"}
    fleet.start_agent("a")
    assert eventually(lambda: not residents(fleet) and why(fleet, "resident_dropped"))
    assert "its GPU cannot read it" in why(fleet, "resident_dropped")[-1]


def test_the_scrub_counts_what_it_reads_and_stops_when_it_is_off(memory_directory):
    with fleet_that_scrubs(memory_directory / "off", "off") as fleet, Worker(fleet) as worker:
        flip(fleet, FIRST_WEIGHT)
        worker.kill()
        # The check after its death finds it.
        assert eventually(lambda: why(fleet, "resident_mended"))
        assert metric(fleet, "rekindle_resident_scrubbed_bytes_total") == 0
        assert metric(fleet, "rekindle_resident_wrong_tiles_total") == 1
        assert metric(fleet, "rekindle_resident_mended_tiles_total") == 1
