"""A worker of an engine, as far as weights go: checkpoint-engine's own receiver.

    python checkpoint_engine_receiver.py ADDRESS [--device N] [--fault KIND] [--at N] [--seconds S]
        [--passes N] [--old]

Without a GPU the module of the device (torch.cuda) is a stand-in whose calls do nothing; the
protocol and the rebuilding of the buffer are checkpoint-engine's. Says one line of JSON: for each
pass what it has got ({name: [dtype, shape, sha256]}), in how many buckets, and whether the hook
ran; or {"error": …}. `Receiver` starts it from a process that has imported torch already.
"""
import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import types

import torch
import zmq
from checkpoint_engine import worker


class NoDevice:
    def __init__(self):
        self.device_module = types.SimpleNamespace(
            synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)


def digest(tensor):
    flat = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Worker:
    def __init__(self, options):
        self.options, self.got, self.buckets, self.hook, self.twice = options, {}, 0, 0, []

    def take(self, weights):
        if self.options.fault and self.buckets == self.options.at:
            self.fail()
        self.buckets += 1
        for name, tensor in weights:
            if name in self.got:
                self.twice.append(name)
            self.got[name] = [str(tensor.dtype), list(tensor.shape), digest(tensor)]

    def fail(self):
        if self.options.fault == "sleep":
            time.sleep(self.options.seconds)
        if self.options.fault == "error":
            raise ValueError("no parameter of this name: the model is another")
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        if self.options.fault in signals:
            os.kill(os.getpid(), signals[self.options.fault])

    def finish(self):
        if self.options.fault == "hook":
            raise ValueError("the hook fails")
        self.hook += 1

    def run(self):
        if self.options.old:
            return self.run_as_before_0_4()
        worker.update_weights_from_ipc(zmq.Context.instance(), self.options.address,
                                       self.options.device, run=self.take, post_hook=self.finish)

    def run_as_before_0_4(self):
        """Post-processes and ends at the first None."""
        context = zmq.Context()
        socket = context.socket(zmq.REP)
        socket.connect(self.options.address)
        buffer = worker._rebuild_ipc(socket.recv_pyobj(), self.options.device)
        socket.send(b"")
        while (payload := socket.recv_pyobj()) is not None:
            self.take(worker._extract_weights(payload, buffer))
            socket.send(b"")
        self.finish()
        socket.send(b"")
        socket.close()
        context.term()  # the answer is out before this process ends

    def report(self):
        return {"tensors": self.got, "buckets": self.buckets, "hook": self.hook,
                "twice": self.twice}


def receive(arguments):
    """What there is to say, and the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--fault", choices=["error", "kill", "stop", "hook", "handle", "sleep"])
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--old", action="store_true")
    options = parser.parse_args([str(argument) for argument in arguments])
    if torch.cuda.is_available():
        torch.cuda.set_device(options.device)
    else:
        worker.DeviceManager = NoDevice
    if options.fault == "handle":
        worker._rebuild_ipc = lambda *_: torch.empty(8, dtype=torch.float32)  # not bytes
    workers = [Worker(options) for _ in range(options.passes)]
    try:
        for one in workers:
            one.run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, 1
    return [one.report() for one in workers], 0


def receive_and_say(pipe, arguments):
    said, code = receive(arguments)
    pipe.send(said)
    sys.exit(code)


class Receiver:
    """One in a process of its own."""

    # The server finds this module by the environment only, before Python 3.13.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["checkpoint_engine_receiver"])

    def __init__(self, address, *options):
        self._said, said = self._context.Pipe(duplex=False)
        self.process = self._context.Process(target=receive_and_say, daemon=True,
                                             args=(said, [address, *options]))
        self.process.start()
        said.close()

    def report(self, patience_s=60):
        assert self._said.poll(patience_s), "the receiver has not ended"
        said = self._said.recv()
        self.process.join(patience_s)
        return said

    def exit_code(self, patience_s=60):
        self.process.join(patience_s)
        return self.process.exitcode


if __name__ == "__main__":
    said, code = receive(sys.argv[1:])
    print(json.dumps(said), flush=True)
    sys.exit(code)
