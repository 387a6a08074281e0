"""Joint publications: several ranks on two hosts publish one version together."""
import concurrent.futures
import os
import time

import numpy
import pytest
from conftest import PATIENCE_S, eventually
from safetensors.numpy import load_file

import rekindle


class Shard:
    """A rank's boxes: (name, slices of the whole tensor)."""

    def __init__(self, *boxes):
        self.boxes = boxes


def whole_tensors(seed=1):
    """More tiles than one, tiles that cuts divide, short rows, one dimension, a scalar, nothing."""
    make = numpy.random.default_rng(seed)
    return {
        "experts": make.integers(0, 255, (6, 96, 512), numpy.uint8),
        "rows": make.standard_normal((1000, 700)).astype(numpy.float32),
        "columns": make.standard_normal((300, 900)).astype(numpy.float16),
        "norm": make.standard_normal(4099).astype(numpy.float32),
        "scalar": numpy.array(7.5, numpy.float64),
        "nothing": numpy.zeros((0, 8), numpy.float32),
    }


# Ranks 0 and 1 are on host a, 2 and 3 on host b.
SHARDS = [
    Shard(("experts", numpy.s_[0:2]), ("rows", numpy.s_[0:333]), ("columns", numpy.s_[:, 0:225]),
          ("norm", numpy.s_[0:1025]), ("scalar", numpy.s_[()]), ("nothing", numpy.s_[:])),
    Shard(("experts", numpy.s_[2:4]), ("rows", numpy.s_[333:334]), ("columns", numpy.s_[:, 225:450]),
          ("norm", numpy.s_[1025:2050]), ("scalar", numpy.s_[()])),
    Shard(("experts", numpy.s_[2:6]), ("rows", numpy.s_[334:1000]),
          ("columns", numpy.s_[:, 450:675]), ("norm", numpy.s_[2050:3075])),
    Shard(("experts", numpy.s_[4:6]), ("rows", numpy.s_[600:1000]),
          ("columns", numpy.s_[:, 675:900]), ("norm", numpy.s_[3075:4099])),
]


def add_box(publication, name, tensor, box):
    slices = box if isinstance(box, tuple) else (box,)
    offset = [cut.indices(extent)[0] for cut, extent in zip(slices, tensor.shape)]
    offset += [0] * (tensor.ndim - len(offset))
    publication.add(name, tensor[box], shape=tensor.shape, offset=tuple(offset))


def publish_rank(fleet, version, rank, tensors, shards=SHARDS, timeout=PATIENCE_S, hosts="aabb"):
    with rekindle.publisher(version, rank=rank, world=len(shards),
                            agent=fleet.store(hosts[rank])) as publication:
        for name, box in shards[rank].boxes:
            add_box(publication, name, tensors[name], box)
        if rank == 0:
            publication.file("config.json", b'{"model_type": "test"}')
        return publication.commit(timeout)


def publish_all(fleet, version, tensors, **options):
    """Each rank in a thread. Returns what each gets: Published, or its error."""
    def one(rank):
        own = tensors[rank] if isinstance(tensors, list) else tensors
        try:
            return publish_rank(fleet, version, rank, own, **options)
        except rekindle.Error as error:
            return error
    ranks = len(options.get("shards", SHARDS))
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def nothing_is_left(fleet):
    """No file of a publication that did not become a version."""
    def clean():
        # os.walk passes over a directory that an agent removes at that moment; rglob raises.
        return not any(files for name in "ab" for folder in ("staging", "agent/publish")
                       for _, _, files in os.walk(fleet.store(name) / folder))
    return eventually(clean)


def state_of(fleet, version):
    status = fleet.run("status", "--coordinator", fleet.coordinator)
    model, _, number = version.partition("@")
    for found in status["versions"]:
        if found["model"] == model and found["version"] == int(number):
            return found
    return None


def test_four_ranks_on_two_hosts_publish_the_bytes_and_the_root_of_one(fleet, tmp_path):
    tensors = whole_tensors()
    outcomes = publish_all(fleet, "joint@1", tensors)
    assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes
    found = state_of(fleet, "joint@1")
    assert found["state"] == "ready", found
    pulled = fleet.pull_to("joint@1", tmp_path / "out")
    loaded = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        loaded.update(load_file(path))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert numpy.array_equal(loaded[name], tensor), name
    assert (tmp_path / "out" / "config.json").read_bytes() == b'{"model_type": "test"}'
    # Whole, by one publisher, in a store that no coordinator knows.
    from safetensors.numpy import save_file
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_bytes(b'{"model_type": "test"}')
    alone = fleet.run("publish", "joint@1", tmp_path / "model", "--store", tmp_path / "alone")
    assert alone["root"] == pulled["root"] == found["root"]
    assert nothing_is_left(fleet)


def test_no_host_holds_more_than_the_boxes_of_its_ranks(fleet):
    tensors = {"w": numpy.arange(4 * 1000 * 1000, dtype=numpy.float32).reshape(4000, 1000)}
    quarters = [Shard(("w", numpy.s_[rank * 1000:(rank + 1) * 1000])) for rank in range(4)]
    assert publish_all(fleet, "halves@1", tensors, shards=quarters)[0].bytes == 4_000_000
    # Ranks 0 and 1, and 2 and 3, have the same: it is held once.
    twins = [Shard(("w", numpy.s_[rank // 2 * 2000:(rank // 2 + 1) * 2000])) for rank in range(4)]
    outcomes = publish_all(fleet, "halves@2", tensors, shards=twins)
    assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes
    for version in ("halves@1", "halves@2"):
        for name in "ab":
            files = (fleet.store(name) / "models" / version).rglob("*.safetensors")
            assert 8_000_000 <= sum(path.stat().st_size for path in files) < 8_100_000


def test_workers_attach_to_a_version_in_parts(fleet):
    tensors = whole_tensors(2)
    outcomes = publish_all(fleet, "attached@1", tensors)
    assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes
    for name in "ab":
        with rekindle.attach("attached", agent=fleet.store(name)) as session:
            found = {key: value.numpy(force=True).copy() for key, value in session}
        for key, tensor in tensors.items():
            assert numpy.array_equal(found[key], tensor), key


def test_a_second_publication_of_the_same_bytes_succeeds_and_of_others_is_denied(fleet):
    tensors = whole_tensors(3)
    for _ in range(2):
        outcomes = publish_all(fleet, "again@1", tensors)
        assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes
    outcomes = publish_all(fleet, "again@1", whole_tensors(4))
    assert all(isinstance(one, rekindle.DeniedError) for one in outcomes), outcomes
    assert nothing_is_left(fleet)


@pytest.mark.parametrize("change, words", [
    (lambda shards: shards[2].boxes[1:], ["no rank", "'experts'"]),
    (lambda shards: (("rows", numpy.s_[334:900]),) + shards[2].boxes[2:] + shards[2].boxes[:1],
     None),
])
def test_a_hole_names_the_tensor(fleet, change, words):
    shards = list(SHARDS)
    shards[2] = Shard(*change(SHARDS))
    if words is None:
        shards[3] = Shard(*[box for box in SHARDS[3].boxes if box[0] != "rows"])
        words = ["no rank", "'rows'"]
    else:
        shards[3] = Shard(*SHARDS[3].boxes[1:])
    outcomes = publish_all(fleet, "hole@1", whole_tensors(), shards=shards)
    for one in outcomes:
        assert isinstance(one, rekindle.InvalidError), outcomes
        assert all(word in str(one) for word in words), one
        assert "\n" not in str(one)
    assert nothing_is_left(fleet)
    assert state_of(fleet, "hole@1") is None


def test_ranks_that_disagree_are_named(fleet):
    tensors = [whole_tensors() for _ in SHARDS]
    tensors[3]["norm"] = tensors[3]["norm"].astype(numpy.float64)
    outcomes = publish_all(fleet, "disagree@1", tensors)
    for one in outcomes:
        assert isinstance(one, rekindle.InvalidError), outcomes
        assert "'norm'" in str(one) and "rank 3" in str(one), one
    assert nothing_is_left(fleet)


@pytest.mark.parametrize("name, box", [("experts", numpy.s_[2, 0, 0]), ("scalar", numpy.s_[()])])
def test_replicas_with_other_bytes_are_named(fleet, name, box):
    """On another host: of two on one host, one is never read."""
    shards = [Shard(("experts", numpy.s_[:]), ("scalar", numpy.s_[()])) for _ in range(4)]
    tensors = [{key: whole_tensors()[key].copy() for key in ("experts", "scalar")} for _ in shards]
    for rank in (2, 3):
        tensors[rank][name][box] += 1
    outcomes = publish_all(fleet, f"replica-{name}@1", tensors, shards=shards)
    for one in outcomes:
        assert isinstance(one, rekindle.InvalidError), outcomes
        assert f"'{name}'" in str(one) and "rank" in str(one) and "differs" in str(one), one
    assert nothing_is_left(fleet)


def test_a_world_that_never_completes_names_the_missing_ranks(fleet):
    with pytest.raises(rekindle.TimeoutError, match="ranks 1, 2 and 3"):
        publish_rank(fleet, "missing@1", 0, whole_tensors(), timeout=2)
    assert nothing_is_left(fleet)
    # The next one works.
    outcomes = publish_all(fleet, "missing@1", whole_tensors())
    assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes


def test_a_rank_twice_is_refused(fleet):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(publish_rank, fleet, "twice@1", 0, whole_tensors(), timeout=3)
        time.sleep(1)
        with pytest.raises(rekindle.DeniedError, match="rank 0"):
            publish_rank(fleet, "twice@1", 0, whole_tensors(), timeout=3)
        with pytest.raises(rekindle.Error, match="rank 0.*on|'a'|node a"):
            publish_rank(fleet, "twice@1", 0, whole_tensors(), timeout=3, hosts="bbbb")
        with pytest.raises(rekindle.InvalidError, match="2 ranks|world"):
            publish_rank(fleet, "twice@1", 1, whole_tensors(), timeout=3, shards=SHARDS[:2])
        with pytest.raises(rekindle.TimeoutError):
            first.result()


def test_without_a_coordinator_one_agent_has_all_ranks(tmp_path, memory_directory):
    from conftest import Rekindle
    alone = Rekindle.__new__(Rekindle)
    alone.directory, alone.gpu, alone.processes, alone.ready, alone.agents = tmp_path, "off", [], [], {}
    alone.environment = {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")}
    alone.store = lambda name: memory_directory / "joint-alone"
    try:
        alone._daemon("agent", "--listen", "127.0.0.1:0", "--node-id", "a", "--store",
                      alone.store("a"))
        tensors = whole_tensors(6)
        outcomes = publish_all(alone, "alone@1", tensors)
        assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes
        with rekindle.attach("alone", agent=alone.store("a")) as session:
            found = {key: value.numpy(force=True).copy() for key, value in session}
        for key, tensor in tensors.items():
            assert numpy.array_equal(found[key], tensor), key
    finally:
        alone.close()
