"""Processes of the real program, with or without the recorder under them."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from disk_model import Content, write_image

WAIT_S = 60


class Failed(Exception):
    """The test failed, or could not be carried out."""


class Daemon:
    """A coordinator or an agent. Its output goes to files."""

    def __init__(self, lab, *arguments, env=None):
        self.lab = lab
        self.err_path = lab.scratch / f"daemon-{lab.number()}.err"
        self.out_path = self.err_path.with_suffix(".out")
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = lab.daemons[self] = subprocess.Popen(
                [lab.rekindle, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env
            )

    def err(self):
        return self.err_path.read_text(errors="replace")

    def wait_for(self, path, pattern):
        deadline = time.monotonic() + WAIT_S
        while True:
            ended = self.process.poll() is not None
            found = re.search(pattern, path.read_text(errors="replace"))
            if found:
                return found
            if ended or time.monotonic() > deadline:
                self.end(signal.SIGKILL)
                raise Failed(f"the {self.process.args[1]} does not start: {self.err().strip()[-800:]}")
            time.sleep(0.005)

    def address(self):
        return self.wait_for(self.out_path, r"(?:coordinator|agent) listening on (\S+)\n").group(1)

    def connected(self):
        self.wait_for(self.err_path, "coordinator.connected")

    def wait(self):
        return self.process.wait(WAIT_S)

    def end(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.wait()
        self.lab.daemons.pop(self, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end(signal.SIGKILL)


class Lab:
    """The program, and directories to work in."""

    def __init__(self, rekindle, recorder, work):
        self.rekindle = rekindle
        self.recorder = recorder
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="power.", dir=work)).resolve()
        memory = pathlib.Path("/dev/shm")
        usable = memory.is_dir() and os.access(memory, os.W_OK)
        # In memory, because nothing needs to be synced there; short, because sockets lie in it.
        self.images = pathlib.Path(tempfile.mkdtemp(prefix="rkp.", dir=memory if usable else None))
        self.numbers = 0
        self.daemons = {}  # those that run: Daemon -> its process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for daemon in list(self.daemons):
            daemon.end(signal.SIGKILL)
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.images, ignore_errors=True)

    def number(self):
        self.numbers += 1
        return self.numbers

    def command(self, *arguments, env=None):
        """(exit code, the JSON that it answered)"""
        done = subprocess.run(
            [self.rekindle, *map(str, arguments), "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=env,
            timeout=WAIT_S,
        )
        text = done.stdout.decode(errors="replace").strip()
        try:
            return done.returncode, json.loads(text)
        except ValueError:
            return done.returncode, {"out": text, "err": done.stderr.decode(errors="replace")}

    def must(self, *arguments, env=None):
        code, answer = self.command(*arguments, env=env)
        if code != 0:
            raise Failed(f"rekindle {' '.join(map(str, arguments))}: exit code {code}: {answer}")
        return answer

    @contextlib.contextmanager
    def image(self, tree):
        directory = self.images / str(self.number())
        write_image(tree, directory)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class Recording:
    """A directory under the recorder, and what the harness tells the record of the answers that it had."""

    def __init__(self, lab, name):
        self.recorder = lab.recorder
        self.disk = lab.scratch / name
        self.trace = lab.scratch / f"{name}.trace"
        self.disk.mkdir()
        self.trace.mkdir()

    def env(self, **more):
        ours = {
            "LD_PRELOAD": str(self.recorder),
            "REKINDLE_TEST_DISK": str(self.disk),
            "REKINDLE_TEST_DISK_TRACE": str(self.trace),
        }
        return {**os.environ, **ours, **more}

    def _say(self, **words):
        with open(self.trace / "trace", "ab", buffering=0) as trace:
            trace.write(f"0\tsay\t{json.dumps(words)}\n".encode())

    def _damage(self, path, code):
        """In front of the recorder, with the file open as `fd`."""
        code = f"import os, sys; fd = os.open(sys.argv[1], os.O_RDWR); {code}"
        subprocess.run([sys.executable, "-c", code, path], check=True, env=self.env())
        return Content.of(pathlib.Path(path).read_bytes())

    def cut_short(self, path, size):
        """As a failing disk would."""
        return self._damage(path, f"os.ftruncate(fd, {size})")

    def rot(self, path, offsets):
        """Flips bits of a file that lies on the disk: nothing needs to be synced for them to stay."""
        flip = "[os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)"
        self._say(rots=str(pathlib.Path(path).relative_to(self.disk)))
        rotten = self._damage(path, f"{flip} for at in {offsets}]")
        self._say(rots=None)
        return rotten

    def begin(self, key):
        """From now on `key` may be as before or as it will be."""
        self._say(begin=key)

    def promise(self, key, value):
        """The client was told."""
        self._say(promise=key, value=value)
