"""Ranks of torch.distributed with gloo, forked from one process, because importing torch takes
longer than most tests."""
import ctypes
import os
import signal
import sys
import traceback

import torch
# Imported before the fork: each rank would import it at its first DTensor.
import torch._dynamo  # noqa: F401
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


def run(world, directory, rank_main):
    """Calls `rank_main(rank)` in each of `world` processes that form a group. Returns 1 as soon as
    a rank has failed. The others would wait for it."""
    ranks = {_fork(rank, world, directory, rank_main) for rank in range(world)}
    failed = False
    while ranks:
        done, status = os.wait()
        ranks.remove(done)
        if status and not failed:
            failed = True
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
    return int(failed)


def _fork(rank, world, directory, rank_main):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Ends with its parent, which the test kills after its deadline.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", world),
                                rank=rank, world_size=world)
        rank_main(rank)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
