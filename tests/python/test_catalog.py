"""What a version consists of, known without taking it."""
import numpy
import pytest

import rekindle

KNOWN = {"a.w": numpy.arange(6, dtype="f4").reshape(2, 3), "b": numpy.array(1, "i8"),
         "c": numpy.zeros((0, 4), "f2"), "large": numpy.ones(4 << 20, "f4")}


@pytest.fixture(scope="module")
def published(fleet, store):
    rekindle.publish(KNOWN, "m@1", files={"config.json": b"{}", "notes.txt": b"n"}, agent=store)
    rekindle.publish(KNOWN, "bare@1", agent=store)


def listed(catalog):
    return {info.name: (info.dtype, info.shape, info.full_shape, info.nbytes)
            for info in catalog.tensors}


EXPECTED = {"a.w": ("F32", (2, 3), (2, 3), 24), "b": ("I64", (), (), 8),
            "c": ("F16", (0, 4), (0, 4), 0), "large": ("F32", (4 << 20,), (4 << 20,), 16 << 20)}


def test_names_every_tensor_and_file(published, store):
    found = rekindle.catalog("m", agent=store)
    assert (found.model, found.version) == ("m", 1)
    assert listed(found) == EXPECTED
    assert found.file_names == ["config.json", "notes.txt"]
    assert found.files() == {"config.json": b"{}", "notes.txt": b"n"}


@pytest.mark.parametrize("version", ["m@1", "bare@1"])
def test_a_host_without_the_version_fetches_a_tensor_and_no_more(published, fleet, version):
    store = fleet.store("b")
    assert listed(rekindle.catalog(version, agent=store)) == EXPECTED
    held = fleet.run("status", "--store", store)["holdings"]
    assert all(one["payload_bytes"] < 1000 for one in held), held


def test_of_a_version_without_files(published, store):
    found = rekindle.catalog("bare", 1, agent=store)
    assert listed(found) == EXPECTED
    assert found.file_names == [] and found.files() == {}


def test_of_nothing_is_an_error(published, store):
    with pytest.raises(rekindle.NotFoundError, match="m@7"):
        rekindle.catalog("m", 7, agent=store)
    with pytest.raises(rekindle.InvalidError):
        rekindle.catalog(agent=store)
