"""Real vLLMs that load a checkpoint and its published version."""
import os
import pathlib
import socket

from .processes import run_ranks

HERE = pathlib.Path(__file__).parent
PATIENCE_S = 600  # vLLM takes half a minute to import and configure, and more on a busy machine


def run_vllm(rekindle, path, options, world=1, ranks=None, **job):
    """What each rank says. `ranks`: what is different for a rank."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    environment = {**os.environ, "REKINDLE_CACHE": str(rekindle.directory / "cache")}
    job = {"path": str(path), "world": world, "meeting": meeting,
           "options": {"agent": str(rekindle.store("a")), **options}, **job}
    jobs = [{**job, "rank": rank, **(ranks or {}).get(rank, {})} for rank in range(world)]
    return [said for said, _ in run_ranks(HERE / "vllm_worker.py", jobs, environment, PATIENCE_S)]
