"""The units and the script of docs/guides/slurm-and-systemd.md, with the real daemons."""
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
USER = 65532
needs_pods = pytest.mark.skipif(not can_run_pods(), reason="no root, no namespaces or no bubblewrap here")


def unit(name):
    """The settings of a unit, each with its values."""
    text, = re.findall(rf"```ini\n# /etc/systemd/system/{name}\n(.*?)```", PAGE, re.DOTALL)
    settings = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text.replace("\\\n", ""), re.MULTILINE):
        settings.setdefault(key, []).append(value)
    return text, settings


@needs_pods
@pytest.mark.parametrize("owner, mode", [(USER, 0o400), (0, 0o440)], ids=["systemd 252", "systemd 254"])
def test_the_coordinator_reads_the_credential_that_systemd_makes(owner, mode, tmp_path):
    _, settings = unit("rekindle-coordinator.service")
    for name, mode_of_directory in [(f"run/{settings['RuntimeDirectory'][0]}", settings["RuntimeDirectoryMode"][0]),
                                    (f"var/lib/{settings['StateDirectory'][0]}", "0755"), ("run/credentials", "0755")]:
        path = tmp_path / name
        path.mkdir(parents=True)
        path.chmod(int(mode_of_directory, 8))
        os.chown(path, USER, USER)
    secret = tmp_path / "run/credentials/secret"
    secret.write_text("a secret of more than 16 bytes")
    os.chown(secret, owner, USER)
    secret.chmod(mode)
    commands = [command.replace("%d", "/run/credentials").replace("%t", "/run")
                for key in ("ExecStartPre", "ExecStart") for command in settings[key]]
    process = subprocess.Popen(
        ["bwrap", "--die-with-parent", "--unshare-net", "--unshare-pid", *ROOT_FILES, "--ro-bind", BINARY,
         "/usr/local/bin/rekindle", "--bind", tmp_path / "run", "/run", "--perms", "0755", "--dir", "/var", "--bind",
         tmp_path / "var/lib", "/var/lib", "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups",
         "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "sh", "-euc", "\n".join(commands)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "coordinator listening on" in line:
                break
        assert "coordinator listening on 0.0.0.0:7300" in "".join(lines)
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("name", ["rekindle-coordinator.service", "rekindle-agent.service"])
def test_systemd_accepts_each_unit(name, tmp_path):
    (tmp_path / name).write_text(unit(name)[0].replace("/usr/local/bin/rekindle", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True,
                              timeout=PATIENCE_S)
    assert [line for line in verified.stderr.splitlines() if name in line] == []


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
