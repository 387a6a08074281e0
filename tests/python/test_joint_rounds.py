"""Updates of workers with versions that trainers on other hosts have published in parts."""
import threading

import pytest
import torch
from conftest import PATIENCE_S, eventually
from test_joint import SHARDS, Shard, publish_all, whole_tensors

import rekindle

HOSTS = "cd"


@pytest.fixture(scope="module")
def workers_hosts(fleet):
    for name in HOSTS:
        fleet.start_agent(name)


def tensors_of(seed):
    """Several buckets of a share, besides the odd shapes."""
    layer = torch.arange(1024 * 1024, dtype=torch.int32).reshape(1024, 1024)
    layers = {f"layers.{number:02}": (layer * seed + number).numpy() for number in range(16)}
    return {**whole_tensors(seed), **layers}


class Worker(threading.Thread):
    """Serves version 1, and then the version of the next update."""

    def __init__(self, fleet, model, number, place):
        super().__init__(daemon=True)
        self.options = {"instance": f"{model}-{number}", "device": f"double:{place % 2}",
                        "group": model, "agent": fleet.store(HOSTS[place // 2]),
                        "bucket_bytes": 1 << 20}
        self.model = model
        self.serving = threading.Event()
        self.got = None
        self.failure = None

    def run(self):
        try:
            with self.attach(1, 0) as session:
                session.commit(PATIENCE_S)
                self.serving.set()
                version = session.wait_for_update(PATIENCE_S)
            with self.attach(version, 1) as session:
                session.commit(PATIENCE_S)
        except BaseException as failure:  # noqa: BLE001 - the test raises it
            self.failure = failure
            self.serving.set()

    def attach(self, version, generation):
        session = rekindle.attach(self.model, version, generation=generation, **self.options)
        self.got = {name: value.clone() for name, value in session}
        return session


def test_an_update_takes_its_bytes_from_trainers_that_have_parts(fleet, workers_hosts):
    """Two workers on each of two hosts. No host has the version, and none of the trainers' hosts
    has a worker."""
    model = "fed"
    old, new = tensors_of(3), tensors_of(4)
    rows = [slice(rank * 256, rank * 256 + 256) for rank in range(4)]
    shards = [Shard(*shard.boxes, *((name, rows[rank]) for name in new if "layers" in name))
              for rank, shard in enumerate(SHARDS)]
    assert all(isinstance(one, rekindle.Published)
               for one in publish_all(fleet, f"{model}@1", old, shards=shards))
    workers = [Worker(fleet, model, number, number) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert worker.serving.wait(PATIENCE_S) and worker.failure is None, worker.failure
    assert all(isinstance(one, rekindle.Published)
               for one in publish_all(fleet, f"{model}@2", new, shards=shards))
    plan = fleet.run("update", f"{model}@2", "--group", model, "--dry-run",
                     "--coordinator", fleet.coordinator)
    assert len(plan["parties"]) == 1 and plan["parties"][0]["owners_fetch"], plan
    assert all(rank["owner"] for rank in plan["parties"][0]["ranks"])
    done = rekindle.update(f"{model}@2", group=model, gather=PATIENCE_S, timeout=PATIENCE_S,
                           agent=fleet.store("c"))
    assert (done.members, done.ready, done.by_broadcast) == (4, 4, 4), done
    for worker in workers:
        worker.join(PATIENCE_S)
        assert worker.failure is None, worker.failure
        for name, tensor in new.items():
            assert torch.equal(worker.got[name], torch.from_numpy(tensor)), name
    fetched = {name: eventually(lambda: fetched_by(fleet, name, f"{model}@2")) for name in HOSTS}
    size = sum(tensor.nbytes for tensor in new.values())
    assert all(size / 4 < bytes_ < size for bytes_ in fetched.values()), (fetched, size)
    given = sum(host["gives"] for host in plan["hosts"])
    assert abs(given - plan["parties"][0]["bytes"]) < 16, plan


def fetched_by(fleet, node, version):
    """Bytes that the copy of this host took over the network, by its agent's log; None: it is not
    whole yet."""
    for path in fleet.directory.glob("agent-*.log"):
        lines = path.read_text().splitlines()
        if not any(f"agent.ready node={node} " in line for line in lines):
            continue
        for line in lines:
            if f"worker.pulled version={version} " in line:
                return int(line.split("fetched_bytes=")[1].split()[0])
    return None
