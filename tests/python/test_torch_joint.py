"""rekindle.torch.publish from real ranks with FSDP2, on two hosts."""
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import PATIENCE_S, ROOT, free_port
from safetensors.torch import load_file

torch = pytest.importorskip("torch")

EXAMPLE = ROOT / "python/examples/sharded_trainer.py"
WORLD = 3  # divides none of the layers evenly


def start_rank(fleet, rank, port, *arguments):
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": "", "REKINDLE_STORE": str(fleet.store("aab"[rank]))}
    return subprocess.Popen([sys.executable, str(EXAMPLE), *map(str, arguments)],
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=environment)


def whole_model(directory):
    found = {}
    for path in pathlib.Path(directory).glob("*.safetensors"):
        found.update(load_file(path))
    return found


def train_alone(steps, width):
    """The same training without shards."""
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    versions = []
    for _ in range(steps):
        sample = torch.randn(16, width)
        (model(sample) - sample).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        versions.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return versions


def test_the_example_publishes_each_step_of_a_sharded_training(fleet, tmp_path):
    port = free_port()
    ranks = [start_rank(fleet, rank, port, "--steps", 2, "--width", 250) for rank in range(WORLD)]
    try:
        said = [rank.communicate(timeout=2 * PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, said
    assert "published policy@2" in said[0]
    for step, expected in enumerate(train_alone(2, 250), 1):
        fleet.pull_to(f"policy@{step}", tmp_path / str(step))
        found = whole_model(tmp_path / str(step))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)
        assert (tmp_path / str(step) / "config.json").is_file()
