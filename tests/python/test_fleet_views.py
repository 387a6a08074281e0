"""`rekindle top` and `rekindle support-bundle` with real daemons."""
import fcntl
import json
import os
import pty
import select
import signal
import stat
import struct
import subprocess
import tarfile
import termios
import time

import pytest
from conftest import BINARY, PATIENCE_S, eventually

SECRET = "not-for-other-eyes-0123456789abcdef"


def read_until(terminal, text):
    """What the terminal has shown when `text` has come."""
    shown, deadline = b"", time.monotonic() + PATIENCE_S
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536)
    return shown


@pytest.fixture()
def on_a_terminal(fleet):
    """`top` of the fleet on a terminal, and the terminal's other end."""
    ours, its = pty.openpty()
    process = subprocess.Popen([BINARY, "top", "--coordinator", fleet.coordinator, "--interval", "100ms"],
                               stdin=its, stdout=its, stderr=its, env=fleet.environment)
    os.close(its)
    yield process, ours
    process.kill()
    process.wait()
    os.close(ours)


def test_top_shows_the_fleet_until_q(on_a_terminal):
    process, terminal = on_a_terminal
    shown = read_until(terminal, b"2 of 2 hosts well")
    assert shown.startswith(b"\x1b[?1049h") and b"q: end" in shown
    os.write(terminal, b"p")
    read_until(terminal, b"p: go on")
    os.write(terminal, b"s")
    read_until(terminal, b"sort by rate")
    os.write(terminal, b"q")
    read_until(terminal, b"\x1b[?1049l")
    assert process.wait(PATIENCE_S) == 0


def test_top_serves_keys_while_its_coordinator_hangs(on_a_terminal, fleet):
    process, terminal = on_a_terminal
    read_until(terminal, b"2 of 2 hosts well")
    coordinator = fleet.processes[0]
    coordinator.send_signal(signal.SIGSTOP)
    try:
        shown = read_until(terminal, b"no answer for ")
        # What it knows stays.
        assert b"2 of 2 hosts well" in shown + read_until(terminal, b"hosts well")
        os.write(terminal, b"s")
        read_until(terminal, b"sort by rate")
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 10, 30, 0, 0))
        read_until(terminal, b"\x1b[2J")
        os.write(terminal, b"q")
        read_until(terminal, b"\x1b[?1049l")
        assert process.wait(PATIENCE_S) == 0
    finally:
        coordinator.send_signal(signal.SIGCONT)


def test_top_gives_the_terminal_back_at_a_signal(on_a_terminal):
    process, terminal = on_a_terminal
    read_until(terminal, b"hosts well")
    process.send_signal(signal.SIGTERM)
    read_until(terminal, b"\x1b[?1049l")
    assert process.wait(PATIENCE_S) == 0


def test_top_elsewhere_prints_frames(fleet):
    done = subprocess.run([BINARY, "top", "-n", "2", "--interval", "100ms", "--coordinator", fleet.coordinator],
                          capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert done.stdout.count("rekindle top, epoch") == 2
    assert done.stdout.count("\na ") == done.stdout.count("\nb ") == 2


def test_top_without_a_coordinator_says_what_it_needs(fleet):
    done = subprocess.run([BINARY, "top"], capture_output=True, text=True, timeout=PATIENCE_S,
                          env=fleet.environment)
    assert done.returncode == 2 and "--coordinator" in done.stderr


def bundle(fleet, to, *more, path=None):
    environment = {**fleet.environment, **({"PATH": path} if path else {})}
    return subprocess.run([BINARY, "support-bundle", "--json", "--to", to, "--store", fleet.store("a"),
                           "--coordinator", fleet.coordinator, *more], capture_output=True, text=True,
                          timeout=PATIENCE_S, env=environment)


def test_bundle_has_what_the_daemons_say_and_no_secret(fleet, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    config = tmp_path / "rekindle.toml"
    config.write_text(f'secret-file = "{secret}"\n')
    # A program that does not end, in place of one that not every host has.
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 1000\n")
    (slow / "nvidia-smi").chmod(0o755)
    to = tmp_path / "bundle.tar.gz"
    done = bundle(fleet, to, "--config", config, "--timeout", "5s", path=f"{slow}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(to.stat().st_mode) == 0o600
    with tarfile.open(to) as archive:
        files = {name.split("/", 1)[1]: archive.extractfile(name).read()
                 for name in archive.getnames() if archive.getmember(name).isfile()}
    about = json.loads(files["about.json"])
    assert {entry["file"] for entry in about["files"]} == set(files) - {"about.json"}
    outcomes = {entry["file"]: entry["outcome"] for entry in about["files"]}
    assert outcomes["agent-status.json"] == outcomes["fleet-status.json"] == outcomes["version.json"] == "ok"
    assert outcomes["host/gpus.txt"] == "took too long"
    assert json.loads(files["agent-status.json"])["node"] == "a"
    assert {node["node"] for node in json.loads(files["fleet-status.json"])["nodes"]} == {"a", "b"}
    kinds = {json.loads(line)["kind"] for line in files["fleet-events.jsonl"].splitlines()}
    assert "node_joined" in kinds
    assert str(secret).encode() in files["rekindle.toml"] and str(secret).encode() in files["agent-settings.txt"]
    assert all(SECRET.encode() not in content for content in files.values())


def test_an_interrupted_bundle_leaves_nothing(fleet, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "journalctl").write_text("#!/bin/sh\nexec sleep 1000\n")
    (slow / "journalctl").chmod(0o755)
    environment = {**fleet.environment, "PATH": f"{slow}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    to = tmp_path / "bundle.tar.gz"
    process = subprocess.Popen([BINARY, "support-bundle", "--to", to, "--store", fleet.store("a")],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    eventually(lambda: list(temporary.glob("*/*/host/journal.txt")))
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert list(temporary.iterdir()) == [] and not to.exists()


def test_bundle_replaces_no_file_and_leaves_none(fleet, tmp_path):
    to = tmp_path / "mine"
    to.write_text("mine")
    done = bundle(fleet, to)
    assert done.returncode != 0 and str(to) in done.stdout
    assert to.read_text() == "mine"
    # Without a program that it needs it says so.
    done = bundle(fleet, tmp_path / "other", path="/nonexistent")
    assert done.returncode != 0 and "timeout" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
