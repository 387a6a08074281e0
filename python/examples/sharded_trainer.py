"""A sharded trainer that publishes its weights in parts, from every rank, after every step.

    torchrun --nproc-per-node 8 python/examples/sharded_trainer.py --steps 3

Each host needs an agent, and its ranks find it by $REKINDLE_STORE. No rank gathers the model: each
copies its own shards into the memory of its host's agent. The version is ready when all have.
"""
from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rekindle.torch


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--model", default="policy", help="the name of the model")
    options.add_argument("--steps", type=int, default=3, help="training steps, each a version")
    options.add_argument("--width", type=int, default=256, help="of the layers")
    chosen = options.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(chosen.width, 4 * chosen.width), nn.ReLU(),
                          nn.Linear(4 * chosen.width, chosen.width)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step in range(1, chosen.steps + 1):
        sample = torch.randn(16, chosen.width, device=device)
        loss = (model(sample) - sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        began = time.monotonic()
        published = rekindle.torch.publish(model, f"{chosen.model}@{step}",
                                           files={"config.json": b'{"model_type": "example"}'})
        if dist.get_rank() == 0:
            print(f"published {published.model}@{published.version}, loss {loss.item():.4f}, "
                  f"{time.monotonic() - began:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
