"""A worker whose models take turns: `switch_process.py STORE DEVICE FIRST OPTIONS-AS-JSON`.

It prints a line of JSON when it is ready and after each switch."""
import json
import os
import sys
import time
import warnings

import torch

import rekindle
import rekindle.torch

SHAPES = {"a": (64, 300), "b": (64, 300), "c": (17, 40), "misfit": (64, 300)}


class Net(torch.nn.Module):
    def __init__(self, rows, columns, norm_first):
        super().__init__()
        if norm_first:
            self.norm = torch.nn.LayerNorm(columns)
        self.first = torch.nn.Linear(columns, rows)
        if not norm_first:
            self.norm = torch.nn.LayerNorm(columns)
        self.tied = self.norm
        self.register_buffer("scale", torch.ones(5))


def build(name, norm_first):
    with torch.device("meta"):
        net = Net(*SHAPES[name], norm_first)
    # It is not saved, so its values are the builder's.
    net.register_buffer("mask", torch.full((3,), float(len(name))), persistent=False)
    return net


def main():
    store, device, first = sys.argv[1:4]
    options = json.loads(sys.argv[4])
    dies_at, hangs_at, fails_at, rebinds = (
        options.pop(key, None) for key in ("dies_at", "hangs_at", "fails_at", "rebinds"))
    norm_first, key = options.pop("norm_first", False), options.pop("key", None)
    if key:
        rekindle.torch.turns.residents.key_of = lambda *_: key
    warned = []
    warnings.showwarning = lambda message, *rest, **more: warned.append(str(message))
    drained = []

    def drain():
        drained.append(models.name)
        if models.name == dies_at:
            os._exit(9)
        if models.name == hangs_at:
            time.sleep(600)
        if models.name == fails_at:
            raise RuntimeError("requests do not end")

    def answer():
        model = models.model
        print(json.dumps({
            "name": models.name, "version": models.session.version, "rung": models.session.rung, "warned": warned,
            "sum": sum(float(value.double().sum()) for value in model.state_dict().values()),
            "first": model.first.weight[3, :4].tolist(), "mask": model.mask.tolist(),
            "at": model.first.weight.data_ptr(), "tied": model.tied is model.norm, "drained": drained,
            "phases": list(models.phases),
        }), flush=True)

    with torch.no_grad():
        models = rekindle.torch.Models({name: lambda name=name: build(name, norm_first) for name in options.pop("models", ["a", "b", "c"])},
                                       device=device, agent=store, **options)
        models.switch(first)
        answer()
        if rebinds:
            module = models._modules[rebinds]
            module.first.weight.data = module.first.weight.data.clone()
        while True:
            if models.follow(1.0, drain):
                answer()


main()
