"""A worker whose parameters outlive it: `resident_process.py STORE MODEL DEVICE OPTIONS-AS-JSON`.

It prints a line of JSON when it is ready, then obeys lines on stdin, and answers each with a line:
`show`, `scribble`, `update VERSION`, `stage VERSION [host]`, `rebind`, `fork`, `detach`, `watch`, `step`,
`step-unmended`."""
import json
import os
import sys
import time
import warnings

import torch

import rekindle
import rekindle.torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(300, 700)
        self.second = torch.nn.Linear(700, 300, bias=False)
        self.norm = torch.nn.LayerNorm(300)
        self.tied = self.norm
        self.register_buffer("scale", torch.ones(5))


def fork():
    """The pid of a child that has all files of this process open, but not those of the test."""
    child = os.fork()
    if child == 0:
        for number in range(3):
            os.close(number)
        while True:
            time.sleep(1000)
    return child


def main():
    store, name, device = sys.argv[1:4]
    options = json.loads(sys.argv[4])
    warned = []
    warnings.showwarning = lambda message, *rest, **more: warned.append(str(message))
    where = torch.device("cpu") if device.startswith("double:") else torch.device(device)
    model = Net().to("meta" if options.pop("meta", False) else where)
    with torch.no_grad():
        for value in model.parameters():
            if not value.is_meta:
                value.fill_(7.0)

    def answer(session):
        print(json.dumps({
            "rung": session.rung, "kept": session.resident, "version": session.version, "warned": warned,
            "first": model.first.weight[3, :4].tolist(), "scale": model.scale.tolist(),
            "sum": sum(float(value.cpu().double().sum()) for value in model.state_dict().values()),
            "tied": model.tied is model.norm, "at": model.first.weight.data_ptr(),
        }), flush=True)

    def load(version):
        session = rekindle.torch.load(model, name, version, device=device, agent=store,
                                      **{"resident": True, **options})
        session.commit(60)
        return session

    with torch.no_grad():
        session = load(1)
        answer(session)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "scribble":
                model.second.weight[10, 11] += 1
            elif word == "watch":
                assert session.next_order() is None
            elif word == "step":
                order = session.next_order(60)
                session.mend()
                order.done()
                print(json.dumps({"kind": order.kind, "tensors": order.tensors}), flush=True)
                continue
            elif word == "step-unmended":
                session.next_order(60).fail("it cannot pause")
            elif word == "update":
                before, session = session, load(int(rest[0]))
                before.close()
            elif word == "stage":
                where_to = {} if rest[1:] == ["host"] else {"device": device}
                with rekindle.torch.stage(model, name, int(rest[0]), agent=store,
                                          **where_to) as staged:
                    before, session = session, staged.switch()
                before.close()
            elif word == "rebind":
                model.second.weight.data = model.second.weight.data.clone()
            elif word == "fork":
                print(json.dumps({"child": fork()}), flush=True)
                continue
            elif word == "detach":
                session.close()
                print("{}", flush=True)
                continue
            answer(session)


main()
