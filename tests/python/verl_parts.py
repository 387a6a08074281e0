"""What test_verl_parts.py and the test of the real verl share."""
import pathlib
import subprocess
import sys

import torch
from safetensors.torch import load_file

RANKS = pathlib.Path(__file__).parent / "verl_ranks.py"
WORLD = 3


def published(fleet, kind, directory):
    """Returns, for each case and step: the metrics of rank 0, how many tensors a rank has gathered,
    the tensors that verl gathers, and those that a pull of the version gets."""
    stores = [fleet.store("aab"[rank]) for rank in range(WORLD)]
    done = subprocess.run(
        [sys.executable, RANKS, kind, directory, fleet.coordinator, *stores],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    found = {}
    for case, (version, said, gathered, expected) in torch.load(directory / "found.pt").items():
        pulled = directory / case.replace(" ", "-")
        fleet.pull_to(f"{case.split()[0]}@{version}", pulled)
        tensors = {}
        for path in pulled.glob("*.safetensors"):
            tensors.update(load_file(path))
        found[case] = (said, gathered, expected, tensors)
    return found, done.stderr
