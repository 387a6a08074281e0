"""The script of docs/guides/slurm-and-systemd.md, with the real daemons."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile

import pytest
from manifests import BINARY, ROOT
from pods import PATIENCE_S, ROOT_FILES, can_run_pods, eventually, run

PAGE = (ROOT / "docs/guides/slurm-and-systemd.md").read_text()
needs_pods = pytest.mark.skipif(not can_run_pods(), reason="no root, no namespaces or no bubblewrap here")


class SlurmJob:
    """The script on one machine that is all nodes of the job. Its steps are processes of this machine."""

    COMMANDS = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'while case $1 in --*) ;; *) false ;; esac; do shift; done; exec "$@"',
        "vllm": "echo the engine is up; exec sleep $SERVE_S",
    }

    def __init__(self, directory, **commands):
        for place in ("bin", "home", "tmp", "shm", "checkpoints"):
            (directory / place).mkdir()
        for name, text in {**self.COMMANDS, **commands}.items():
            (directory / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (directory / "bin" / name).chmod(0o755)
        run(BINARY, "demo", "--model-only", directory / "checkpoints/Qwen3-8B", "--gib", "0.01",
            stdin=subprocess.DEVNULL)
        script, = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
        (directory / "script").write_text(script)
        self.directory = directory
        self.log = directory / "log"
        self.process = None

    def start(self, serve_s):
        environment = {"PATH": "/commands:/usr/local/bin:/usr/bin:/bin", "HOME": "/home", "SLURM_JOB_ID": "7",
                       "SLURM_JOB_NODELIST": "node-[1-1]", "SLURM_NNODES": "1", "SERVE_S": str(serve_s)}
        binds = {"bin": "/commands", "home": "/home", "tmp": "/tmp", "shm": "/dev/shm", "checkpoints": "/checkpoints",
                 "script": "/script"}
        with self.log.open("w") as log, (self.directory / "info").open("w") as info:
            self.process = subprocess.Popen(
                ["bwrap", "--die-with-parent", "--unshare-net", "--unshare-pid", "--as-pid-1", *ROOT_FILES, "--ro-bind",
                 BINARY, "/usr/local/bin/rekindle",
                 *(word for place, path in binds.items() for word in ("--bind", self.directory / place, path)),
                 "--clearenv", *(word for pair in environment.items() for word in ("--setenv", *pair)), "--info-fd",
                 str(info.fileno()), "bash", "/script"], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                pass_fds=[info.fileno()])
        return self

    def pid(self):
        return json.loads((self.directory / "info").read_text())["child-pid"]

    def left_over(self):
        return sorted(path.name for place in ("home", "tmp", "shm") for path in (self.directory / place).iterdir())


@pytest.fixture
def directory():
    """On tmpfs: the store lies in it."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-slurm.", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@needs_pods
def test_a_slurm_job_serves_and_leaves_nothing(directory):
    job = SlurmJob(directory).start(serve_s=0)
    assert job.process.wait(PATIENCE_S) == 0, job.log.read_text()
    assert re.search(r"published qwen3@41: .*\nthe engine is up", job.log.read_text(), re.DOTALL)
    assert job.left_over() == []


@needs_pods
def test_a_slurm_job_that_gets_sigterm_leaves_nothing(directory):
    job = SlurmJob(directory).start(serve_s=600)
    eventually(lambda: "the engine is up" in job.log.read_text(), job.log.read_text)
    assert job.left_over() == [".rekindle-secret-7", "rekindle-7", "rekindle-7"]
    os.kill(job.pid(), signal.SIGTERM)
    assert job.process.wait(PATIENCE_S) == 143, job.log.read_text()
    assert job.left_over() == []


@needs_pods
def test_a_slurm_job_whose_agent_does_not_start_ends_with_one_line(directory):
    broken = 'case "$*" in *" rekindle agent "*) exit 1 ;; esac; ' + SlurmJob.COMMANDS["srun"]
    job = SlurmJob(directory, srun=broken).start(serve_s=600)
    assert job.process.wait(PATIENCE_S) == 1, job.log.read_text()
    assert "the coordinator or an agent has ended" in job.log.read_text()
    assert job.left_over() == []
