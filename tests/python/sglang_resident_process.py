"""Loads a model as SGLang does, by a stand-in for it: `sglang_resident_process.py STORE OPTIONS-AS-JSON`.
It prints a line of JSON, and again after each line `update` or `by-name` on stdin."""
import json
import logging
import sys
import types

import pytest
import torch
from torch import nn

import sglang_stand_in as stand_in


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(torch.empty(200, 300), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.loads = 0

    def load_weights(self, weights):
        self.loads += 1
        for name, weight in weights:
            if name == "w":
                self.part.data.copy_(weight.narrow(0, 200, 200))


def postprocess(model, device):
    stand_in.DefaultModelLoader.steps.append("postprocess")
    model.doubled = model.part.data * 2
    model.rows = 200


def main():
    store, options = sys.argv[1], json.loads(sys.argv[2])
    sglang = stand_in.install(pytest.MonkeyPatch())
    stand_in.DefaultModelLoader.makes = Model
    stand_in.DefaultModelLoader.postprocess_weights = staticmethod(postprocess)
    sglang.server.arguments = {"port": id(sglang), **options.pop("arguments", {})}
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("rekindle").addHandler(handler)
    from rekindle._engines.loading import held
    from rekindle.sglang.loader import RekindleModelLoader
    loader = RekindleModelLoader(stand_in.LoadConfig(
        RekindleModelLoader, {"model": "sgr", "agent": store, "device": "double:0",
                              "resident": True, "version": 1, **options}))
    model = loader.load_model(
        model_config=types.SimpleNamespace(
            model_path="m", is_draft_model=False, dtype=torch.float32, quantization=None,
            hf_config=types.SimpleNamespace(to_json_string=lambda: "{}")),
        device_config=types.SimpleNamespace(device="cpu"))

    def answer():
        now = held("target")
        print(json.dumps({
            "rung": now.session.rung, "kept": now.session.resident, "warned": warned,
            "version": now.session.version, "part": float(model.part.double().sum()),
            "doubled": float(model.doubled.double().sum()), "rows": model.rows,
            "scale": model.scale.tolist(), "steps": stand_in.DefaultModelLoader.steps,
            "loads": model.loads, "preloaded": getattr(loader, "preloaded_weights_bytes", 0),
            "training": model.training}), flush=True)

    answer()
    for line in sys.stdin:
        if line.strip() == "update":
            stand_in.from_disk(model)()
        else:
            import rekindle.sglang
            rekindle.sglang.load(model, rekindle.sglang.version("sgr", 2))
        answer()


with torch.no_grad():
    main()
