"""A coordinator and an agent, for benchmarks of the Python package."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys


class Fleet:
    """A coordinator, and an agent with a store in `directory`: with the GPUs of this host, or with
    `doubles` of them."""

    def __init__(self, directory: pathlib.Path, device: str, doubles: int = 1,
                 drills: bool = False) -> None:
        self.store = directory / "store"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.directory = directory
        more = ["--allow-drills"] if drills else []
        self.coordinator = self._start("coordinator", "--state", directory / "state", *more)
        gpu = "auto" if device.startswith("cuda") else f"double:{doubles}"
        self._start("agent", "--node-id", "bench", "--store", self.store, "--gpu", gpu,
                    "--coordinator", self.coordinator, *more)

    def _start(self, role: str, *arguments: object) -> str:
        with open(self.directory / f"{role}.log", "wb") as log:
            process = subprocess.Popen(
                [os.environ["REKINDLE_BINARY"], role, "--json", "--listen", "127.0.0.1:0",
                 *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=log)
        self.processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the {role} ended: " + (self.directory / f"{role}.log").read_text())
        return str(json.loads(line)["listen"])

    @property
    def agent_pid(self) -> int:
        return self.processes[-1].pid

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait()
