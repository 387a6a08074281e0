"""A coordinator with its status page, and agents: real processes on loopback ports."""
import json
import os
import pathlib
import select
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("REKINDLE_BINARY", str(ROOT / "build/dev/bin/rekindle"))
CROWD = os.environ.get("REKINDLE_PAGE_CROWD", str(ROOT / "build/dev/tests/page/page_crowd"))
WORKER = str(pathlib.Path(BINARY).parent / "example_worker")

sys.path.insert(0, str(ROOT / "tests/support"))

from eventually import PATIENCE_S, eventually  # noqa: E402


class Fleet:
    def __init__(self, directory, *arguments):
        self.directory = directory
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")}
        self.processes = []
        self.agents = {}
        self.lead("127.0.0.1:0", "0", directory / "state", *arguments)

    def lead(self, listen, http, state, *arguments):
        self.coordinator_process, ready = self.daemon(
            "coordinator", "--listen", listen, "--state", state, "--http", http, *arguments)
        self.coordinator, self.http = ready["listen"], ready["http"]

    def lose_coordinator(self):
        """Another one at the same place, without the state of the first one."""
        self.coordinator_process.kill()
        self.coordinator_process.wait()
        self.lead(self.coordinator, self.http, self.directory / "another-state")

    def url(self, path=""):
        return f"http://{self.http}/{path}"

    def daemon(self, role, *arguments):
        with open(self.directory / f"{role}-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen([BINARY, role, "--json", *map(str, arguments)], stdout=subprocess.PIPE,
                                       stderr=log, stdin=subprocess.DEVNULL, env=self.environment)
        self.processes.append(process)
        return process, json.loads(self._line(process))

    @staticmethod
    def _line(process):
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready, "a process did not say that it is ready"
        line = process.stdout.readline()
        assert line, "a process ended before it was ready"
        return line

    def agent(self, name, *arguments, rack=""):
        store = self.directory / name
        self.agents[name], _ = self.daemon(
            "agent", "--listen", "127.0.0.1:0", "--node-id", name, "--store", store, "--gpu", "none",
            "--coordinator", self.coordinator, *(["--failure-domain", rack] if rack else []), *arguments)

    def kill(self, name):
        process = self.agents.pop(name)
        process.kill()
        process.wait()

    def crowd(self, hosts, *name):
        process = subprocess.Popen([CROWD, self.coordinator, str(hosts), *name], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)
        self.processes.append(process)
        assert self._line(process) == b"joined\n"
        return process

    def command(self, *arguments):
        return [BINARY, *map(str, arguments), "--json", "--quiet"]

    def run(self, *arguments):
        done = subprocess.run(self.command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=PATIENCE_S, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def worker(self, name, model, instance):
        """A worker on the host of this agent, and its supervisor."""
        supervisor = subprocess.Popen(
            [BINARY, "run", "--model", model, "--instance", instance, "--store", self.directory / name, "--", WORKER],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.environment)
        self.processes.append(supervisor)
        return supervisor

    @staticmethod
    def kill_worker(supervisor):
        path = f"/proc/{supervisor.pid}/task/{supervisor.pid}/children"
        for pid in eventually(lambda: pathlib.Path(path).read_text().split()):
            os.kill(int(pid), signal.SIGKILL)

    def start(self, *arguments):
        process = subprocess.Popen(self.command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=self.environment)
        self.processes.append(process)
        return process

    def close(self):
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()  # a supervisor ends its worker
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()


def write_checkpoint(path, mebibytes):
    """One safetensors file with zeros and a counter in each MiB."""
    size = 1 << 20
    header = {f"layer.{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
              for i in range(mebibytes)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(mebibytes):
            file.write(i.to_bytes(8, "little") * (size // 8))
