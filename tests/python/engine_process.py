"""A stand-in for an engine whose model outlives it: `engine_process.py STORE KIND OPTIONS-AS-JSON`.

It makes a model, or takes over that of its predecessor, as the loader of an engine does. KIND is what
its post-processing does. It prints a line of JSON, then obeys lines on stdin, and answers each with
a line: `update VERSION`, `serve` (which changes a scale), `scribble`."""
import hashlib
import json
import logging
import sys
import time

import torch
from torch import nn

from rekindle._engines import loading, on_meta, postprocessing, resident
from rekindle._engines.loading import Place, Update, Wanted, fill, hold, read_contents
from rekindle._engines.options import Options
from rekindle._engines.ranks import ONE
from rekindle.errors import InvalidError

DEVICE = "double:0"


class Weight(nn.Parameter):
    """A parameter with a loader of its own, as engines have."""


class Kernel:
    def __init__(self, weight):
        self.weight = weight


class Method:
    """A quantization method: it belongs to a layer, and is no module."""

    def __init__(self):
        self.kernel = None
        self.rows = 0


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = Weight(torch.empty(size, 256), requires_grad=False)
        self.weight.output_dim = 0
        self.weight.loader = self.load
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.arange(4096.0), persistent=False)
        self.method = Method()
        self.offset = torch.zeros(3)

    def load(self, value):
        self.weight.data.copy_(value)

    def process(self, kind):
        self.method.rows = len(self.weight)
        if kind == "quantized":
            weight = nn.Parameter(self.weight.data.half().t(), requires_grad=False)
            weight.loader = self.weight.loader
            self.weight = weight
            self.norms = torch.ones(len(self.bias)) * 3
            # A view with a stride, of memory that a parameter has too.
            self.rest = self.weight[1:, ::2]
            self.bias = None
            self.dtype = torch.float16
            self.shape = torch.Size([1, 2])
        elif kind == "kernel":
            self.method.kernel = Kernel(self.weight)
        elif kind == "alias":
            self.method.rows = 7
            hidden.append(self.weight.data)
        elif kind == "twice":
            self.twice = self.weight.detach() * 2


hidden = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(300), Layer(700)
        self.head = self.second

    def load_weights(self, pairs):
        for name, value in pairs:
            layer, part = name.split(".")
            if part == "weight":
                getattr(self, layer).weight.loader(value)
            else:
                getattr(self, layer).bias.data.copy_(value)

    def process(self, kind):
        self.first.process(kind)
        self.second.process(kind)


def digest(value):
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def shown(model):
    return {
        "tensors": sorted(
            [*slot, type(value).__name__, str(value.dtype), list(value.shape),
                     list(value.stride()), digest(value),
                     sorted(key for key in vars(value) if not key.startswith("_rekindle"))]
                    for slot, value in resident._slots(model)),
        "plain": {postprocessing.shown(at): str(value) for at, value in
                  postprocessing.noted(model).items()
                  if postprocessing._encoded(value) is not None},
        "tied": model.head is model.second, "at": model.first.weight.data_ptr(),
        "kernel": model.first.method.kernel is not None and (
            model.first.method.kernel.weight is model.first.weight)}


def main():
    store, kind, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    rebuilds, key = options.pop("rebuilds", False), options.pop("key", "key")
    other, lose = options.pop("other", False), options.pop("lose", False)
    options = Options.parse({"model": "e", "version": 1, "agent": store, "device": DEVICE,
                             "resident": True, **options})
    place = Place("engine", time.time_ns() // 1_000_000, 0, 1)
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("rekindle").addHandler(handler)
    model, meta = None, 0
    taken = resident.take(options, place, DEVICE, key)
    if taken is not None:
        try:
            with resident.making(torch.device("cpu")) as made:
                model = Net()
                if lose:
                    hidden.append(torch.empty(1 << 20))
                if other:
                    model.third = Layer(4)
            meta = sum(value.is_meta for value in model.parameters())

            def rebuild():
                for layer in (model.first, model.second):
                    layer.process(kind)
            resident.adopt(model, taken, made, rebuild if rebuilds else None)
            taken.session.commit(60)
            wanted = Wanted(options, place, DEVICE, *resident.boxes_of(taken),
                            read_contents(options))
            hold("target", loading.Held(wanted, taken.session))
            resident.adopted(model, taken, "target")
        except InvalidError as why:
            warned.append(str(why))
            taken.close()
            model, taken = None, None
    if model is None:
        model = Net()
        before = resident.begin(model)
        fill(model, model.load_weights, options, place, None)
        model.process(kind)
        why = resident.keep(model, before, "target", key, ONE, rebuilds)
        if why is not None:
            resident.warn("e", why)

    def answer():
        now = loading.held("target")
        print(json.dumps({**shown(model), "rung": now.session.rung, "meta": meta,
                          "version": now.session.version, "kept": now.session.resident,
                          "warned": warned}), flush=True)

    answer()
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "update":
            now = loading.held("target")
            # What an engine does while it serves.
            model.first.cache, model.first.method.graph = torch.zeros(9000), Kernel(None)
            model.first.offset = torch.zeros(7)
            resident.note("target")
            later = loading.replace(options, version=int(rest[0]))
            fill(model, model.load_weights, later, loading.replace(
                now.place, generation=now.place.generation + 1), None,
                update=Update(now.contents))
            if kind == "twice":
                for layer in (model.first, model.second):
                    layer.process(kind)
            elif "object" in rest:
                model.first.method.kernel = Kernel(model.first.weight)
            resident.seal_again("target")
            model.first.offset = torch.zeros(3)
            del model.first.cache, model.first.method.graph
        elif word == "serve":
            model.first.scale.fill_(0.25)
            model.first.offset.add_(1)
        elif word == "scribble":
            model.first.weight[10, 11] += 1
        answer()


with torch.no_grad():
    main()
