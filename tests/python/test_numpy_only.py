"""A worker and a trainer without torch: everything in numpy, in host memory."""
import gc
import sys
import threading

import numpy
import pytest
from conftest import PATIENCE_S, run_python

import rekindle
from rekindle import Box, _optional


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    """Also where it is installed."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        _optional.module.cache_clear()
        yield
    _optional.module.cache_clear()


KNOWN = {"a.weight": numpy.arange(6000, dtype="f4").reshape(60, 100),
         "b": numpy.arange(7, dtype="i8"), "scalar": numpy.array(2.5, "f8"),
         "half": numpy.linspace(-1, 1, 9, dtype="f2"), "empty": numpy.zeros((0, 3), "u1"),
         "flags": numpy.array([True, False]), "swapped": numpy.arange(5, dtype=">i4")}


@pytest.fixture(scope="module")
def published(fleet, store):
    rekindle.publish(KNOWN, "m@1", files={"config.json": b"{}"}, agent=store)


def same(found, known=KNOWN):
    assert found.keys() == known.keys()
    for name, array in known.items():
        assert found[name].dtype == array.dtype.newbyteorder("="), name
        assert found[name].shape == array.shape and (found[name] == array).all(), name


def test_what_was_published_comes_back_as_views_to_be_read_only(published, store):
    with rekindle.attach("m", agent=store) as session:
        found = dict(session)
        assert session.files == {"config.json": b"{}"} and session.version == 1
        session.commit(PATIENCE_S)
    gc.collect()
    same(found)
    with pytest.raises(ValueError, match="read-only"):
        found["b"][0] = 1


def test_load_into_fills_arrays_and_converts(published, store):
    targets = {name: numpy.ones_like(array) for name, array in KNOWN.items()}
    with rekindle.attach("m", agent=store) as session:
        assert session.load_into(targets) == ([], [])
    same({name: array.astype(array.dtype.newbyteorder("=")) for name, array in targets.items()})
    wide = {"half": numpy.zeros(9, "f8"), "b": numpy.zeros(7, "f4")}
    with rekindle.attach("m", shard=list(wide), agent=store) as session:
        session.load_into(wide)
    assert (wide["half"] == KNOWN["half"]).all() and (wide["b"] == KNOWN["b"]).all()


def test_boxes_are_parts(published, store):
    box = Box("a.weight", (10, 20), (5, 30))
    target = numpy.zeros((5, 60), "f4")
    with rekindle.attach("m", shard=[box], agent=store) as session:
        session.load_into({box: target[:, ::2]})
    assert (target[:, ::2] == KNOWN["a.weight"][10:15, 20:50]).all() and not target[:, 1::2].any()


@pytest.mark.parametrize("target, said", [
    (numpy.zeros(8, "i8"), "shape"), (numpy.zeros(7, "U3"), "does not convert"),
    ([1, 2], "not a tensor"), (numpy.broadcast_to(numpy.zeros(1), 7), "may not be written")])
def test_targets_that_are_wrong_are_named(published, store, target, said):
    with rekindle.attach("m", shard=["b"], agent=store) as session:
        with pytest.raises(rekindle.InvalidError, match=f"'b'.*{said}|int.*{said}"):
            session.load_into({"b": target})


def test_a_device_needs_torch(published, store):
    with rekindle.attach("m", device="double:0", agent=store) as session:
        with pytest.raises(rekindle.UnavailableError, match="torch is not installed"):
            next(iter(session))


def test_the_catalog_and_the_command(published, store, fleet, tmp_path):
    found = rekindle.catalog("m", agent=store)
    assert {info.name: info.shape for info in found.tensors} == {
        name: array.shape for name, array in KNOWN.items()}
    assert rekindle.status(agent=store)["node"] == "a"
    said = rekindle.pull("m", to=tmp_path / "m", coordinator=fleet.coordinator)
    assert said["tensors"] == len(KNOWN) and (tmp_path / "m/config.json").read_bytes() == b"{}"


def test_sessions_of_several_threads_at_once(published, store):
    failed = []

    def worker():
        try:
            for _ in range(3):
                with rekindle.attach("m", agent=store) as session:
                    same(dict(session))
        except BaseException as why:  # asserted on below
            failed.append(why)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_an_agent_that_is_killed_is_lost_and_its_next_life_has_everything(published, fleet, store):
    with rekindle.attach("m", agent=store) as session:
        found = dict(session)
        fleet.kill_agent("a")
        with pytest.raises(rekindle.PeerLostError):
            session.wait_for_update(PATIENCE_S)
        same(found)  # what is mapped stays
        fleet.start_agent("a")
    with rekindle.attach("m", agent=store, timeout=PATIENCE_S) as session:
        same(dict(session))


WITHOUT_ML_DTYPES = """
import sys
for name in ("torch", "ml_dtypes"): sys.modules[name] = None
import numpy, rekindle
path, store = sys.argv[1:]
rekindle.publish(path, "bf16@1", agent=store)
def load(target):
    with rekindle.attach("bf16", agent=store) as session:
        session.load_into({"w": target})
    return target.tobytes()
with rekindle.attach("bf16", agent=store) as session:
    (name, view), = session
    bits = view.tobytes()
    print(view.dtype, bits.hex())
assert load(numpy.zeros(2, "u2")) == load(numpy.zeros(2, "V2")) == bits
for wrong in ("f4", "f2", "u1"):
    try:
        load(numpy.zeros(2, wrong))
    except rekindle.InvalidError as why:
        assert "install ml_dtypes, or give an array of uint16" in str(why), why
    else:
        sys.exit(f"{wrong} was taken")
"""


def bf16_file(directory):
    """1.0 and -2.0 in BF16."""
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x80\x3f\x00\xc0")
    return path


def test_what_numpy_lacks_is_opaque_bytes(fleet, store, tmp_path):
    said = run_python(WITHOUT_ML_DTYPES, bf16_file(tmp_path), store)
    assert said.split() == ["|V2", "803f00c0"]


def test_what_numpy_lacks_is_of_ml_dtypes_where_that_is_installed(fleet, store, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    known = {"w": numpy.array([1, -2], ml_dtypes.bfloat16),
             "f8": numpy.array([0.5, 3], ml_dtypes.float8_e4m3fn)}
    rekindle.publish(known, "ml@1", agent=store)
    targets = {"w": numpy.zeros(2, "f4"), "f8": numpy.zeros(2, "f2")}
    with rekindle.attach("ml", agent=store) as session:
        same(dict(session), known)
    with rekindle.attach("ml", agent=store) as session:
        session.load_into(targets)
    assert targets["w"].tolist() == [1, -2] and targets["f8"].tolist() == [0.5, 3]
    raw = {"w": numpy.zeros(2, "u2"), "f8": numpy.zeros(2, ml_dtypes.float8_e4m3fn)}
    with rekindle.attach("ml", agent=store) as session:
        session.load_into(raw)
    assert raw["w"].tolist() == [0x3f80, 0xc000] and raw["f8"].tolist() == [0.5, 3]
