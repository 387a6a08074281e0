"""An engine of test_resident_scrub_gpu.py: `resident_busy_worker.py STORE DEVICE LAYERS ELEMENTS`. Its parameters
outlive it. For each line `work SECONDS` it multiplies matrices, and prints how long the steps took as a line of JSON.
"""
import json
import statistics
import sys
import time

import torch
from torch import nn

import rekindle.torch

SIZE = 4096
PRODUCTS = 32


class Layers(nn.Module):
    def __init__(self, layers, elements):
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.empty(elements, device="meta"), requires_grad=False) for _ in range(layers))


def work(matrix, seconds):
    steps, out = [], torch.empty_like(matrix)
    begun = time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=out)
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - now)
    return {"steps": len(steps), "mean_s": statistics.mean(steps), "median_s": statistics.median(steps),
            "longest_s": max(steps)}


def main():
    store, device, layers, elements = sys.argv[1:5]
    model = Layers(int(layers), int(elements))
    session = rekindle.torch.load(model, "busy", 1, device=device, agent=store, resident=True)
    session.commit(600)
    matrix = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) / SIZE
    work(matrix, 2)
    print(json.dumps({"rung": session.rung}), flush=True)
    for line in sys.stdin:
        print(json.dumps(work(matrix, float(line.split()[1]))), flush=True)


main()
