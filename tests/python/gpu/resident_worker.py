"""A worker of test_resident_gpu.py: `resident_worker.py STORE DEVICE ON LAYERS LAYER-BYTES RESIDENT`. It loads, prints
one line of JSON, and waits to be killed."""
import json
import sys
import time

import torch
from torch import nn

import rekindle.torch


class Layers(nn.Module):
    def __init__(self, layers, layer_bytes):
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.empty(layer_bytes // 4, device="meta"), requires_grad=False)
            for _ in range(layers))


def main():
    store, device, on, layers, layer_bytes, resident = sys.argv[1:7]
    synchronize = (lambda: None) if on == "cpu" else torch.cuda.synchronize
    torch.zeros(1, device=on)
    synchronize()
    model = Layers(int(layers), int(layer_bytes))
    begun = time.perf_counter()
    session = rekindle.torch.load(model, "resident", 1, device=device, agent=store,
                                  resident=resident == "yes")
    synchronize()
    loaded = time.perf_counter()
    session.commit(600)
    committed = time.perf_counter()
    first = [float(value[0]) for value in model.layers]
    last = [float(value[-1]) for value in model.layers]
    print(json.dumps({"rung": session.rung, "load_s": loaded - begun, "commit_s": committed - loaded,
                      "first": first, "last": last}), flush=True)
    sys.stdin.read()


main()
