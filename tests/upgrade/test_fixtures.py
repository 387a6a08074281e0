"""This release takes over the files of the previous one, and understands its connections. tests/upgrade/make_fixtures
recorded them."""
import json
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading

import pytest
from fleet import NEW, PATIENCE_S, Fleet, digest_of_directory, eventually

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
# Numbers of the fields of rekindle.proto.Frame, Response and Status, and of AgentFrame.
FRAME_HELLO, FRAME_RESPONSE, RESPONSE_STATUS, STATUS_CODE, AGENT_ERROR, AGENT_HELLO = 1, 4, 2, 1, 4, 10


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7f) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data):
    """The fields of a protobuf message by their numbers: integers and bytes."""
    found, at = {}, 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        found[key >> 3] = value
    return found


def frames(data):
    """Of a control connection."""
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(fields(data[4:4 + size]))
        data = data[4 + size:]
    return found


def read_frames(connection, count):
    data = b""
    connection.settimeout(PATIENCE_S)
    while True:
        complete, at = 0, 0
        while len(data) >= at + 4 and len(data) >= at + 4 + int.from_bytes(data[at:at + 4], "big"):
            at += 4 + int.from_bytes(data[at:at + 4], "big")
            complete += 1
        if complete >= count:
            return data
        got = connection.recv(65536)
        assert got, f"it ended after {complete} of {count} frames: {frames(data)}"
        data += got


@pytest.fixture
def fleet():
    """With the recorded files in their places."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-upgrade.", dir="/dev/shm"))
    shutil.copytree(FIXTURES / "state", directory / "state")
    shutil.copytree(FIXTURES / "store", directory / "store-a")
    # git keeps no modes, and the daemons want theirs.
    for place in ("state", "store-a"):
        for path in (directory / place, *(directory / place).rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
    made = Fleet(directory)
    yield made
    made.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def running(fleet):
    coordinator = fleet.start_coordinator(NEW)
    eventually(lambda: coordinator.has_line("coordinator.ready"), coordinator.said)
    fleet.start_agent(NEW, "a")
    return fleet


def test_state_and_store_are_adopted_and_nothing_is_fetched(running):
    eventually(lambda: running.roots() == {"m@3": EXPECTED["root"]}, lambda: f"{running.roots()}")
    assert running.holdings("a") == {("m", 3)}
    again = running.pull_here(NEW, "m@3", "a")
    assert (again["fetched_bytes"], again["root"]) == (0, EXPECTED["root"])
    node, = running.status()["nodes"]
    assert node["drained"]
    running.command(NEW, "drain", "a", "--undo", "--coordinator", running.coordinators)
    pull = running.start_pull(NEW, "m@3", running.directory / "out")
    assert pull.wait() == 0, pull.said()
    assert digest_of_directory(running.directory / "out") == EXPECTED["digest"]


def test_a_version_that_was_retired_stays_retired(running):
    states = {version["version"]: version["state"] for version in running.status()["versions"]}
    assert states[2] == "retired", states


def test_a_caller_of_the_previous_release_is_answered(running):
    recorded = (FIXTURES / "status.caller").read_bytes()
    with socket.create_connection(("127.0.0.1", running.ports["c1"])) as connection:
        connection.sendall(recorded)
        hello, response = frames(read_frames(connection, 2))
    assert FRAME_HELLO in hello
    assert STATUS_CODE not in fields(fields(response[FRAME_RESPONSE]).get(RESPONSE_STATUS, b"")), response


def test_a_server_of_the_previous_release_is_understood():
    asked = len(frames((FIXTURES / "status.caller").read_bytes()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)

        def answer():
            caller, _ = listener.accept()
            with caller:
                recorded = (FIXTURES / "status.server").read_bytes()
                hello = 4 + int.from_bytes(recorded[:4], "big")
                read_frames(caller, 1)
                caller.sendall(recorded[:hello])
                read_frames(caller, asked - 1)
                caller.sendall(recorded[hello:])
                caller.recv(1)

        serving = threading.Thread(target=answer)
        serving.start()
        done = subprocess.run(
            [NEW.binary, "status", "--json", "--coordinator", f"127.0.0.1:{listener.getsockname()[1]}"],
            capture_output=True, text=True, timeout=PATIENCE_S, env=NEW.environment())
        serving.join(PATIENCE_S)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert [node["node"] for node in status["nodes"]] == ["a"]
    assert {v["version"]: v["root"] for v in status["versions"]}[3] == EXPECTED["root"]


def test_a_library_of_the_previous_release_is_greeted(running):
    with socket.socket(socket.AF_UNIX) as worker:
        worker.settimeout(PATIENCE_S)
        worker.connect(str(running.store("a") / "agent/worker.sock"))
        worker.sendall((FIXTURES / "worker.hello").read_bytes())
        data, _, _, _ = socket.recv_fds(worker, 65536, 8)
    # The header is eight bytes.
    answer = fields(data[8:8 + int.from_bytes(data[:4], "big")])
    assert AGENT_ERROR not in answer and AGENT_HELLO in answer, answer
