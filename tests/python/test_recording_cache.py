"""Plans on disk: what comes back is what was stored, and only under the same fingerprint."""
import os
import threading

import pytest
import torch
from recording_fakes import catalog_of
from rekindle import recording
from rekindle.recording import cache, plan as plans


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))


def load_weights(tensors):
    for name, tensor in tensors:
        if name == "double":
            TARGETS["b"].copy_(tensor * 2)
        else:
            TARGETS["a"][:2].copy_(tensor[1:3].t())
            TARGETS["a"][2:].fill_(-1)
    return {"a"}


TARGETS = {"a": torch.empty(4, 2), "b": torch.empty(3)}
CATALOG = catalog_of({"w": torch.empty(4, 2), "double": torch.empty(3)})


def recorded():
    return recording.record(load_weights, CATALOG, TARGETS)


def key(**more):
    return {"architecture": "tiny", "tp": [0, 2], **more}


def mark(catalog=CATALOG, targets=TARGETS, loaders=(load_weights,), device="cpu", **more):
    return recording.fingerprint(catalog, targets, loaders, key(**more), record_device=device)


def test_a_plan_comes_back_as_it_was():
    plan = recorded()
    assert (len(plan), plan.opaque, plan.loaded) == (1, ("double",), {"a"})
    assert cache.store(mark(), plan)
    assert cache.load(mark()) == plan


def test_recorded_once():
    made = []
    for _ in range(3):
        found = recording.cached(mark(), lambda: made.append(1) or recorded())
    assert (len(made), found) == (1, recorded())


@pytest.mark.parametrize("other", [
    lambda: mark(tp=[1, 2]), lambda: mark(quantization="fp8"),
    lambda: mark(catalog=catalog_of({"w": torch.empty(4, 3), "double": torch.empty(3)})),
    lambda: mark(catalog={**CATALOG, "w": recording.TensorMeta((4, 2), torch.bfloat16)}),
    lambda: mark(targets={**TARGETS, "a": torch.empty(4, 2, dtype=torch.bfloat16)}),
    lambda: mark(targets={**TARGETS, "a": torch.empty(2, 4).t()}),
    lambda: mark(targets={**TARGETS, "b": TARGETS["a"].view(-1)[:3]}),
    lambda: mark(targets={**TARGETS, "b": torch.empty(4)[1:]}),
    lambda: mark(targets={**TARGETS, "b": torch.empty(3, device="meta")}),
    lambda: mark(targets=dict(reversed(TARGETS.items()))), lambda: mark(device="cuda:0"),
    lambda: mark(catalog=dict(reversed(CATALOG.items()))),
    lambda: mark(targets={"a": TARGETS["a"]}), lambda: mark(loaders=(recorded, json_like))])
def test_anything_else_is_another_fingerprint(other):
    assert other() != mark()


def test_the_same_in_other_memory_is_the_same_fingerprint():
    memory = torch.empty(20)
    for targets in (TARGETS, {"a": memory[:8].view(4, 2), "b": memory[8:11]}):
        again = {name: torch.empty_like(tensor) for name, tensor in targets.items()}
        shared = torch.empty(20)
        again = again if targets is TARGETS else {"a": shared[:8].view(4, 2), "b": shared[8:11]}
        assert mark(targets=again) == mark(targets=targets)


def json_like():
    """Of this module, too: but a second loader counts."""


def test_the_loaders_source_counts(tmp_path, monkeypatch):
    import importlib
    import sys
    monkeypatch.syspath_prepend(str(tmp_path))
    marks = []
    for number in range(2):
        (tmp_path / "a_loader.py").write_text(f"def load_weights(tensors):\n    return {number}\n")
        sys.modules.pop("a_loader", None)
        importlib.invalidate_caches()
        import linecache
        linecache.clearcache()
        module = importlib.machinery.SourceFileLoader("a_loader", str(tmp_path / "a_loader.py"))
        spec = importlib.util.spec_from_loader("a_loader", module)
        made = importlib.util.module_from_spec(spec)
        sys.modules["a_loader"] = made
        spec.loader.exec_module(made)
        marks.append(mark(loaders=(made.load_weights,)))
    sys.modules.pop("a_loader", None)
    assert marks[0] != marks[1]


def damages(data):
    middle = len(data) // 2
    yield "empty", b""
    yield "cut off", data[:-1]
    yield "longer", data + b"\0"
    yield "a bit", data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:]
    yield "another version", data.replace(b"plan 2", b"plan 1", 1)
    yield "another's", plans.to_bytes(recorded(), "f" * 32)


@pytest.mark.parametrize("index", range(6))
def test_a_damaged_file_is_recorded_anew(index):
    plan = recorded()
    cache.store(mark(), plan)
    path = recording.cache_directory() / f"{mark()}.plan"
    _, data = list(damages(path.read_bytes()))[index]
    path.write_bytes(data)
    assert cache.load(mark()) is None
    assert recording.cached(mark(), recorded) == plan
    assert cache.load(mark()) == plan


@pytest.mark.parametrize("offset", [5, 1 << 40])
@pytest.mark.parametrize("name", ["w", "with\nnewline"])
def test_wide_numbers_and_odd_names_come_back(offset, name):
    move = plans.Move(name, (0,), (3,), 0, (1,), "a\tb", offset, (3,), (1,), "bfloat16")
    plan = plans.pack([move], [plans.Entry(name, (3,), "bfloat16")], ())
    assert cache.store(mark(), plan)
    found = cache.load(mark())
    assert found == plan and list(found.moves()) == [move]


def test_a_name_that_the_file_cannot_have_is_not_stored():
    plan = plans.pack((), [plans.Entry("a\0b", (3,), "bfloat16")], ("a\0b",))
    assert not cache.store(mark(), plan)
    assert list(recording.cache_directory().iterdir()) == []


def test_what_only_the_loader_can_repeat_is_not_stored():
    def load(tensors):
        for _, tensor in tensors:
            TARGETS["a"].copy_(tensor)
        TARGETS["b"].copy_(torch.arange(3.0))
    plan = recording.record(load, {"w": CATALOG["w"]}, TARGETS)
    assert (len(plan), plan.replayable) == (1, False)
    assert not cache.store(mark(), plan)
    assert list(recording.cache_directory().parent.iterdir()) == []


def test_a_directory_that_cannot_be_written_costs_only_the_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("REKINDLE_CACHE", str(blocked))
    assert recording.cached(mark(), recorded) == recorded()


def test_many_writers_leave_one_whole_file():
    plan = recorded()
    threads = [threading.Thread(target=cache.store, args=(mark(), plan)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(recording.cache_directory()) == [f"{mark()}.plan"]
    assert cache.load(mark()) == plan


def test_a_large_plan_comes_back():
    count = 100_000
    moves = [plans.Move(f"layers.{i}.w", (i, 0), (1, 8), 0, (1,), f"p.{i % 10}", i * 8, (8,), (1,),
                        "float32") for i in range(count)]
    plan = plans.pack(moves, [plans.Entry(m.name, (count, 8), "float32") for m in moves], ())
    cache.store(mark(), plan)
    found = cache.load(mark())
    assert list(found.moves()) == moves
    assert found.entries == plan.entries
