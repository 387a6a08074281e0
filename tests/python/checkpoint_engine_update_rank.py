"""One rank of checkpoint-engine's own test of updates (its tests/test_update.py), with Rekindle's
`ParameterServer` in place of its class.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… \\
        python checkpoint_engine_update_rank.py OPTIONS

OPTIONS is JSON: the arguments of ParameterServer, "lists" (the `ranks` of one update after the
other), "seed", "directory", and perhaps "fails" (the worker of rank 0 does), "from_files" (a part
of the tensors is in files there), "large". A checker process beside each rank is the worker: it has
the rank's own tensors, and compares what it receives under their names. Ends with 0 if all was as
it should be.
"""
import json
import multiprocessing
import os
import pathlib
import random
import sys
import time

import safetensors.torch
import torch
import zmq
from checkpoint_engine import worker
from checkpoint_engine_receiver import NoDevice

from rekindle.compat.checkpoint_engine import ParameterServer

RANK = int(os.environ["RANK"])
DTYPES = [torch.bfloat16] * 4 + [torch.float16] * 6 + [torch.float8_e4m3fn] * 4 + [torch.float] * 3


def make_tensors(seed, large):
    """Of random dtypes and shapes, with names of this rank."""
    choice = random.Random(seed + RANK)
    torch.manual_seed(seed + RANK)
    most = 500 if large else 60
    return {f"rank{RANK}.layer{layer}.num{number}":
            torch.randn(choice.randint(20, most), choice.randint(50, 2 * most)).to(
                choice.choice(DTYPES))
            for layer in range(choice.randint(10, 20)) for number in range(choice.randint(5, 10))}


class Checker:
    """Runs in a process of its own."""

    def __init__(self, tensors, fails):
        self.fails = fails
        self.device = "cpu"
        if torch.cuda.is_available():
            self.device = f"cuda:{RANK}"
            torch.cuda.set_device(RANK)
        else:
            worker.DeviceManager = NoDevice
        self.tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        self.context = zmq.Context()

    def receive(self, address):
        seen = set()

        def check(weights):
            for name, tensor in weights:
                if name in self.tensors:
                    bits = [one.reshape(-1).view(torch.uint8)
                            for one in (tensor, self.tensors[name])]
                    assert tensor.dtype == self.tensors[name].dtype and torch.equal(*bits), name
                    seen.add(name)

        worker.update_weights_from_ipc(self.context, address, RANK, run=check)
        assert seen == set(self.tensors)

    def receive_and_fail(self, address):
        def fail(weights):
            time.sleep(0.1)
            if RANK == 0:
                raise RuntimeError("the worker of rank 0 fails")

        try:
            worker.update_weights_from_ipc(self.context, address, RANK, run=fail)
        except RuntimeError as error:
            # The server says it to all workers.
            assert "the sender failed" in str(error)
            return
        raise AssertionError("the update went on")

    def run(self, addresses):
        while (address := addresses.get()) is not None:
            self.receive_and_fail(address) if self.fails else self.receive(address)


def check(tensors, fails, addresses):
    Checker(tensors, fails).run(addresses)


def register_files(server, tensors, directory):
    """A half in one file, the middle third in another, the second half by name: with overlaps."""
    items, files = list(tensors.items()), []
    for name, part in (("first", items[:len(items) // 2]),
                       ("middle", items[len(items) // 3:2 * len(items) // 3])):
        files.append(str(pathlib.Path(directory) / f"rank-{RANK}-{name}.safetensors"))
        safetensors.torch.save_file(dict(part), files[-1])
    server.register_checkpoint("test", files=files, named_tensors=dict(items[len(items) // 2:]))


def main():
    options = json.loads(sys.argv[1])
    lists, fails = options.pop("lists"), options.pop("fails", False)
    directory, from_files = options.pop("directory"), options.pop("from_files", False)
    tensors = make_tensors(options.pop("seed"), options.pop("large", False))
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    server = ParameterServer(auto_pg=True, **options)
    checker = context.Process(target=check, args=(tensors, fails, addresses), daemon=True)
    checker.start()
    if from_files:
        register_files(server, tensors, directory)
    else:
        server.register_checkpoint("test", named_tensors=tensors)
    server.gather_metas("test")

    def ask(handles):
        addresses.put(handles[RANK][1])

    for ranks in lists:
        try:
            server.update("test", ask, ranks=ranks)
        except RuntimeError:
            assert fails
        else:
            assert not fails
    server.unregister_checkpoint("test")
    addresses.put(None)
    checker.join(60)
    sys.exit(checker.exitcode)


if __name__ == "__main__":
    main()
