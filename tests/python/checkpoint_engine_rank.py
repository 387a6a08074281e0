"""A rank with a ParameterServer, as a script under torchrun has it.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python checkpoint_engine_rank.py STEPS

STEPS is JSON: a list of [method, {arguments}]; says one line of JSON for each: null, what it has
returned, or {"error": "Class: text"}. "update" has a req_func that, on the first of `ranks`,
starts checkpoint-engine's receivers for all of them and waits.
"""
import json
import os
import pathlib
import subprocess
import sys

import torch

from rekindle.compat.checkpoint_engine import ParameterServer

RECEIVER = pathlib.Path(__file__).with_name("checkpoint_engine_receiver.py")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Steps:
    def __init__(self, options):
        self.server = ParameterServer(**options)

    def register(self, name, files=None, tensors=None):
        named = torch.load(tensors, weights_only=True) if tensors else None
        self.server.register_checkpoint(name, files=files, named_tensors=named)

    def unregister(self, name):
        self.server.unregister_checkpoint(name)

    def gather(self, name):
        self.server.gather_metas(name)
        return self.server.get_metas()

    def group(self):
        """As SGLang's script: a group of torch.distributed's for the caller's use."""
        self.server.init_process_group()
        torch.distributed.barrier()

    def grouped(self):
        return torch.distributed.is_initialized()

    def barrier(self):
        self.server.store_based_barrier()

    def update(self, name, ranks=None):
        reports = []

        def receive(handles):
            assert len(handles) == WORLD
            taking = ranks or range(WORLD)
            if RANK != min(taking):
                return
            workers = [subprocess.Popen(
                [sys.executable, RECEIVER, handles[rank][1]], stdout=subprocess.PIPE, text=True)
                for rank in taking]
            reports.extend(json.loads(worker.communicate()[0]) for worker in workers)

        self.server.update(name, receive, ranks=ranks)
        return reports


def main():
    options, steps = json.loads(sys.argv[1])
    ranks = Steps(options)
    for method, arguments in steps:
        try:
            said = getattr(ranks, method)(**arguments)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
