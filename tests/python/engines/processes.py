"""Ranks of an engine, each a process."""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed


def run_ranks(worker, jobs, environment, patience_s):
    """(last line of output, as JSON, and the end of the log) of each job, an argument of `worker`.

    All are read at once: one whose pipe is full would stand still, and the others wait for it. When
    one fails, that is what is said, and the others, which may wait for it, are killed."""
    processes = [subprocess.Popen(
        [sys.executable, worker, json.dumps(job)], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for job in jobs]
    with ThreadPoolExecutor(len(processes)) as pool:
        try:
            ends = {pool.submit(process.communicate, timeout=patience_s): process
                    for process in processes}
            for end in as_completed(ends):
                _, log = end.result()
                assert ends[end].returncode == 0, log[-4000:]
        finally:
            for process in processes:
                process.kill()
    found = [end.result() for end in ends]
    return [(json.loads(out.splitlines()[-1]), log[-4000:]) for out, log in found]
