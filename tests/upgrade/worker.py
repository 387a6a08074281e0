"""A worker for ever: `worker.py STORE MODEL [DEVICE]`. It follows the newest version, and prints a line of JSON for each
that it serves."""
import json
import sys
import time

import numpy
from fleet import digest_of

import rekindle
from rekindle import _abi

store, model, device = (sys.argv + [None])[1:4]
# The agent is being replaced, or the version was retired: attach again.
AGAIN = (rekindle.PeerLostError, rekindle.UnavailableError, rekindle.TimeoutError, rekindle.StaleError,
         rekindle.NotFoundError)


def serve():
    with rekindle.attach(model, agent=store, device=device, instance="i", timeout=30) as session:
        tensors = {name: numpy.array(tensor) for name, tensor in session}
        session.commit(timeout=30)
        print(json.dumps({"version": session.version, "digest": digest_of(tensors), "rung": session.rung,
                          "device_path": session.device_path, "library": _abi.load().rk_library_version().decode()}), flush=True)
        while session.wait_for_update(timeout=5) is None:
            pass


while True:
    try:
        serve()
    except rekindle.Error as error:
        # An agent of 0.1.0 takes a copy that another pull has just committed for a mistake of the worker.
        if not isinstance(error, AGAIN) and "is already here" not in str(error):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        time.sleep(0.1)
