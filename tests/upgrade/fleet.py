"""Daemons, commands and workers of two releases, as one fleet on loopback ports."""
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy
import safetensors.numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
# For each wait for another process.
PATIENCE_S = 60
# `rekindle` ends with this code when the other end is away: retry.
UNREACHABLE = 5
# Said by a pull into a store without an agent.
ALREADY_HERE = "is already here"
NO_AGENT = ": give --coordinator HOST:PORT, or --from"


@dataclasses.dataclass(frozen=True)
class Release:
    """One build: its command, its library and its Python package."""
    name: str
    source: pathlib.Path
    build: pathlib.Path
    speaks_tls: bool = True

    @property
    def binary(self):
        return self.build / "bin/rekindle"

    def environment(self, secret=None):
        """`secret`: the file with that of the fleet, as docs/guides/upgrade.md tells its users to give it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")}
        identity = {}
        if secret:
            identity["REKINDLE_SECRET_FILE"] = str(secret)
            if self.speaks_tls:
                identity["REKINDLE_ADMIT_PROTOCOL_2"] = "true"
        return {**kept, **identity, "PYTHONPATH": str(self.source / "python"), "REKINDLE_BINARY": str(self.binary),
                "REKINDLE_LIBRARY": str(self.build / "src/client/librekindle.so.1")}


NEW = Release("new", ROOT, ROOT / "build/dev")
OLD = Release("old", ROOT / "build/previous/source", ROOT / "build/previous/source/build/dev", speaks_tls=False)


def free_port():
    """Of those that the system gives only to a process that asks for it by number."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(fact, why, patience_s=PATIENCE_S):
    """The result of `fact()` as soon as it is true."""
    deadline = time.monotonic() + patience_s
    while not (found := fact()):
        assert time.monotonic() < deadline, why() if callable(why) else why
        time.sleep(0.05)
    return found


def make_checkpoint(directory, seed, kilobytes):
    """Eight tensors, each of so many random bytes."""
    directory.mkdir(parents=True)
    random_bytes = numpy.random.default_rng(seed)
    tensors = {f"model.layers.{i}.mlp.up_proj.weight":
               random_bytes.integers(0, 256, (kilobytes, 1024), dtype=numpy.uint8) for i in range(8)}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "test"}')
    return directory


def digest_of(tensors):
    """Of all names and bytes; the worker computes the same."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + bytes(tensors[name].data))
    return digest.hexdigest()


def digest_of_directory(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(safetensors.numpy.load_file(file))
    return digest_of({name: t for name, t in tensors.items() if not name.startswith("__rekindle_file__/")})


class Process:
    """A process of one release with its output in files."""

    def __init__(self, release, name, command, log, secret=None):
        self.release = release
        self.name = name
        self.out = log.with_suffix(".out")
        self.log = log
        with self.out.open("wb") as out, log.open("wb") as err:
            self.popen = subprocess.Popen([str(word) for word in command], stdout=out, stderr=err,
                                          stdin=subprocess.DEVNULL, env=release.environment(secret))

    def lines(self):
        """Its complete lines of JSON so far."""
        return [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def said(self):
        return f"{self.name} ({self.release.name}): {self.log.read_text()[-2000:]}"

    def has_line(self, text):
        return text in self.log.read_text() + self.out.read_text()

    def fail_if_ended(self):
        assert self.popen.poll() is None, f"ended with {self.popen.returncode}: {self.said()}"

    def wait(self):
        try:
            return self.popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"hangs: {self.said()}") from None

    def stop(self, how=signal.SIGTERM):
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        return self.wait()


class Fleet:
    """Coordinators, three agents with stores, and workers, each of its own release. `directory` should be on tmpfs."""

    AGENTS = ("a", "b", "c")
    # Of each puller, so that a pull lasts for seconds.
    RATE = "4MB"

    def __init__(self, directory, etcd=False, secret=None):
        self.directory = directory
        self.secret = None
        if secret:
            self.secret = directory / "secret"
            self.secret.write_text(secret)
            self.secret.chmod(0o600)
        self.ports = {name: free_port() for name in ("c1", "c2" if etcd else "c1", *self.AGENTS)}
        self.coordinators = ",".join(f"127.0.0.1:{port}" for name, port in self.ports.items() if name.startswith("c") and
                                     name != "c")
        self.running = {}
        self.last_error = {}
        self.started = []
        # Without an agent, `publish` would write to the store itself: nobody publishes while an agent is replaced.
        self.publishing = {name: threading.Lock() for name in self.AGENTS}
        self.etcd = None
        if etcd:
            client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
            self.etcd = client
            self.start(NEW, "etcd", [
                "/usr/bin/etcd", "--data-dir", directory / "etcd", "--listen-client-urls", client,
                "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}", "--log-level", "warn"])

    def store(self, name):
        return self.directory / f"store-{name}"

    def start(self, release, name, command):
        process = Process(release, name, command, self.directory / f"{len(self.started)}-{name}-{release.name}.log",
                          self.secret)
        self.started.append(process)
        self.running[name] = process
        return process

    def start_coordinator(self, release, name="c1"):
        state = ["--etcd", self.etcd, "--etcd-ttl", "2s"] if self.etcd else ["--state", self.directory / "state"]
        return self.start(release, name, [release.binary, "coordinator", "--listen",
                                           f"127.0.0.1:{self.ports[name]}", *state])

    def start_agent(self, release, name):
        """A command may have the store for a moment. Then the agent is started again, as systemd does."""
        def started():
            process = self.launch_agent(release, name)
            connected = lambda: process.has_line("coordinator.connected")
            eventually(lambda: connected() or process.popen.poll() is not None, process.said)
            assert connected() or process.popen.returncode == UNREACHABLE, process.said()
            return connected() and process
        return eventually(started, "the agent does not start")

    def launch_agent(self, release, name):
        return self.start(release, name, [
            release.binary, "agent", "--node-id", name, "--listen", f"127.0.0.1:{self.ports[name]}", "--store",
            self.store(name), "--coordinator", self.coordinators, "--gpu", "double:1", "--max-rate", self.RATE])

    def start_worker(self, release, agent, model, *device):
        return self.start(release, f"worker-{agent}", [
            sys.executable, ROOT / "tests/upgrade/worker.py", self.store(agent), model, *device])

    def replace(self, name, start):
        """Ends the process as an init system does, and starts its successor."""
        with self.publishing.get(name, contextlib.nullcontext()):
            process = self.running[name]
            code = process.stop()
            crashed = process.release is OLD and code == -signal.SIGSEGV  # see revive()
            assert code == 0 or crashed, f"code {code}: {process.said()}"
            return start()

    def try_command(self, release, *arguments):
        done = subprocess.run([str(word) for word in (release.binary, *arguments, "--json", "--quiet")],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
                              env=release.environment(self.secret))
        self.last_error[arguments] = done.stderr
        away = done.returncode == UNREACHABLE or NO_AGENT in done.stderr
        # 0.1.0 takes a copy that a worker's attach has just committed for a mistake of the caller.
        away = away or (arguments[0] == "pull" and ALREADY_HERE in done.stderr)
        assert done.returncode == 0 or away, f"{arguments} by {release.name}: {done.returncode}: {done.stderr}"
        return None if away else json.loads(done.stdout)

    def revive(self):
        """An agent of 0.1.0 may crash when a source that it reads from is replaced (mended in 0.2.0). An init system starts
        it again."""
        for name in self.AGENTS:
            process = self.running.get(name)
            if process and process.release is OLD and process.popen.poll() == -signal.SIGSEGV:
                self.launch_agent(OLD, name)

    def command(self, release, *arguments):
        """Its answer. Repeated while a daemon that it needs is being replaced."""
        def answer():
            self.revive()
            return self.try_command(release, *arguments)
        return eventually(answer,
                          lambda: f"{arguments} by {release.name} does not succeed: {self.last_error[arguments]}"
                                  f"{self.failed()}")

    def failed(self):
        """The last words of the daemons that have failed."""
        return "".join(f"\ncode {process.popen.returncode}: {process.said()}" for process in self.running.values()
                       if process.popen.poll() not in (None, 0))

    def publish(self, release, version, directory, agent):
        with self.publishing[agent]:
            return self.command(release, "publish", version, directory, "--store", self.store(agent))

    def pull_here(self, release, version, agent):
        return self.command(release, "pull", version, "--store", self.store(agent), "--transport", "tcp")

    def start_pull(self, release, version, directory):
        """By the command itself, without an agent."""
        return self.start(release, f"pull-{directory.name}", [
            release.binary, "pull", version, "--to", directory, "--coordinator", self.coordinators, "--transport",
            "tcp", "--quiet"])

    def status(self, release=NEW):
        return self.command(release, "status", "--coordinator", self.coordinators)

    def roots(self):
        """The root of each version that is ready."""
        return {f"{v['model']}@{v['version']}": v["root"] for v in self.status()["versions"] if v["state"] == "ready"}

    def holdings(self, agent, release=NEW):
        status = self.command(release, "status", "--store", self.store(agent))
        return {(h["model"], h["version"]) for h in status["holdings"]}

    def close(self):
        for process in reversed(self.started):
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()


class Load(threading.Thread):
    """Publishes version after version of `m`, pulls each to the other agents and to a directory, compares the bytes,
    and retires old ones, by the commands of both releases in turn, until it is stopped."""

    KEPT = 3

    def __init__(self, fleet):
        super().__init__(daemon=True)
        self.fleet = fleet
        self.digests = {}
        self.published = {}
        self.pulls = 0
        self.error = None
        self.over = threading.Event()

    def run(self):
        try:
            version = 0
            while not self.over.is_set():
                version += 1
                self._step(version, (OLD, NEW)[version % 2])
        except BaseException as error:  # reported by stop()
            self.error = error

    def _step(self, version, release):
        fleet, name = self.fleet, f"m@{version}"
        checkpoint = make_checkpoint(fleet.directory / f"m-{version}", version, 256)
        self.digests[version] = digest_of_directory(checkpoint)
        first, *others = random.Random(version).sample(fleet.AGENTS, 3)
        self.published[name] = fleet.publish(release, name, checkpoint, first)["root"]
        for agent in others:
            fleet.pull_here(release, name, agent)
        out = fleet.directory / f"out-{version}"
        pull = fleet.start_pull(release, name, out)
        assert pull.wait() == 0, pull.said()
        assert digest_of_directory(out) == self.digests[version], f"{name} has other bytes"
        self.pulls += 3
        if version > self.KEPT:
            gone = f"m@{version - self.KEPT}"
            del self.published[gone]
            fleet.command(release, "retire", gone, "--everywhere", "--force", "--coordinator", fleet.coordinators)

    def progress(self):
        """Waits until a version has gone round since now."""
        before = self.pulls
        eventually(lambda: self.pulls >= before + 6 or not self.is_alive(), "the load stands still")
        assert self.error is None, self.error

    def stop(self):
        self.over.set()
        self.join(4 * PATIENCE_S)
        assert not self.is_alive(), "the load hangs"
        if self.error is not None:
            raise self.error
