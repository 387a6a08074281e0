"""python/examples, as a user starts them."""
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "python/examples"


@pytest.mark.parametrize("device", ["double", "cpu"])
def test_a_training_loop_with_workers_that_are_killed_and_come_back(device):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_infer_loop.py", "--device", device, "--rounds", "2"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker-1 is killed" in done.stdout and "all as it should be" in done.stdout
    assert done.stdout.count("updated 2 of 2 workers") == 2
    assert done.stdout.count(f"{2 if device == 'double' else 0} by broadcast") == 2


def test_it_fails_when_a_worker_says_something_else():
    """The same loop with a trainer that lies about what it expects."""
    code = ("import sys, runpy; sys.argv[1:] = ['--device', 'cpu', '--rounds', '1']\n"
            f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
            "import train_infer_loop as example\n"
            "honest = example.generate\n"
            "example.generate = lambda model: {**honest(model), 'logits': '0'}\n"
            "example.main()\n")
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and "MISMATCH" in done.stdout, done.stdout + done.stderr


def test_it_leaves_nothing_behind_when_it_is_terminated(memory_directory):
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "train_infer_loop.py", "--device", "cpu", "--directory",
         memory_directory], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout.readline().startswith("round 1")
    (directory,) = memory_directory.iterdir()
    process.terminate()
    _, said = process.communicate(timeout=180)
    assert process.returncode == 1 and "SIGTERM" in said
    assert not directory.exists()
