"""Sessions on a device: buckets, and copies into tensors, on doubles of a GPU."""
import threading

import pytest
import torch

import rekindle
from rekindle import Box, _loading, _native, _prefetch
from rekindle._views import device_tensor

MIB = 1 << 20


@pytest.fixture(scope="module")
def published(fleet, store):
    generator = torch.Generator().manual_seed(11)
    known = {f"layer.{i:02}.w": torch.randn(64, 96 + i, generator=generator) for i in range(40)}
    known["large"] = torch.randn(1500, 1024, generator=generator)  # six buckets of 1 MiB
    known["half"] = torch.randn(33, 7, generator=generator).bfloat16()
    known["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    known["empty"] = torch.zeros(0, 4)
    rekindle.publish(known, "m@1", files={"config.json": b"{}"}, agent=store)
    return known


def same(found, known):
    assert found.keys() == known.keys()
    for name in known:
        assert found[name].dtype == known[name].dtype, name
        assert torch.equal(found[name], known[name]), name


def attach(store, **more):
    return rekindle.attach("m", device="double:0", bucket_bytes=MIB, agent=store, **more)


def test_buckets_bring_everything_once(published, store):
    with attach(store) as session:
        assert session.device == "double:0"
        found, sizes = {}, []
        for bucket in session.buckets(timeout=60):
            sizes.append(len(bucket))
            for name, tensor in bucket:
                assert name not in found
                found[name] = tensor.clone()
        assert session.device_path == "ipc"
        session.commit(timeout=60)
    assert len(sizes) > 3 and max(sizes) > 1
    same(found, published)


def test_a_load_makes_as_many_calls_for_many_tensors_as_for_few(store, monkeypatch):
    made = []
    run = _native.Native._run

    def recorded(native, function, *arguments):
        made.append(function)
        run(native, function, *arguments)

    monkeypatch.setattr(_native.Native, "_run", recorded)
    monkeypatch.setattr(_prefetch, "_FEWEST", 1 << 30)
    calls = {}
    for count in (10, 1000):
        known = {f"expert.{i:04}.w": torch.full((4, 4), float(i)) for i in range(count)}
        rekindle.publish(known, f"many{count}@1", agent=store)
        made.clear()
        with rekindle.attach(f"many{count}", device="double:0", agent=store) as session:
            # The list of the tensors is not read yet.
            assert made == ["rk_attach", "rk_info"]
            found = {name: torch.empty(4, 4) for name in known}
            session.load_into(found)
        calls[count] = list(made)
        same(found, known)
    assert calls[10] == calls[1000]
    assert calls[10].count("rk_tensors") == calls[10].count("rk_load_into") == 1


def test_tensors_come_one_by_one_across_loops(published, store):
    found = {}
    with attach(store) as session:
        for name, tensor in session:
            found[name] = tensor.clone()
            if len(found) == 5:
                break
        for name, tensor in session:
            assert name not in found
            found[name] = tensor.clone()
    same(found, published)


def test_files_come_by_their_own_way_before_and_after(published, store):
    with attach(store) as session:
        assert session.files == {"config.json": b"{}"}
        session.load_into({name: torch.empty_like(t) for name, t in published.items()})
        session.commit(timeout=60)
    with attach(store) as session:
        list(session)
        assert session.files == {"config.json": b"{}"}


@pytest.fixture(params=[_prefetch._FEWEST, 0], ids=["", "prefetched"])
def prefetching(request, monkeypatch):
    """Loads of few tensors take buckets while targets are found, too."""
    monkeypatch.setattr(_prefetch, "_FEWEST", request.param)


def targets(published):
    return {name: torch.full_like(tensor, 9) for name, tensor in published.items()}


@pytest.mark.usefixtures("prefetching")
def test_load_into_fills_tensors_in_place(published, store):
    into = targets(published)
    with attach(store) as session:
        assert session.load_into(into) == ([], [])
        session.commit(timeout=60)
    same(into, published)


@pytest.mark.parametrize("most", [_loading.MOST_BUFFERED, 0], ids=["in-batches", "one-by-one"])
@pytest.mark.usefixtures("prefetching")
def test_what_does_not_take_bytes_as_they_are_goes_through_a_buffer(published, store, monkeypatch,
                                                                    most):
    monkeypatch.setattr(_loading, "MOST_BUFFERED", most)
    into = targets(published)
    into["half"] = torch.zeros(33, 7)
    into["large"] = torch.zeros(1024, 1500).t()
    into["layer.03.w"] = torch.zeros(64, 99, dtype=torch.float64)
    into["layer.04.w"] = torch.zeros(64, 200)[:, 50:150]
    with attach(store) as session:
        session.load_into(into)
    assert into["half"].dtype == torch.float32
    for name in published:
        assert torch.equal(into[name], published[name].to(into[name].dtype)), name


def test_load_into_after_a_loop_takes_the_rest(published, store):
    into = targets(published)
    with attach(store) as session:
        first, tensor = next(entry for entry in session if entry[1].numel())
        assert torch.equal(tensor, published[first])
        rest = {name: tensor for name, tensor in into.items() if name not in (first, "empty")}
        result = session.load_into(rest, strict=False)
        assert result.missing == []
    assert torch.equal(into[first], torch.full_like(into[first], 9))
    same(rest, {name: published[name] for name in rest})


@pytest.mark.usefixtures("prefetching")
def test_strict_refuses_before_anything_is_written(published, store):
    into = targets(published)
    with attach(store) as session:
        with pytest.raises(rekindle.NotFoundError, match="'absent' of the targets"):
            session.load_into({**into, "absent": torch.zeros(1)})
        with pytest.raises(rekindle.NotFoundError, match="has no target"):
            session.load_into({"half": into["half"]})
        with pytest.raises(rekindle.InvalidError, match="'half' has shape"):
            session.load_into({**into, "half": torch.zeros(7, 33).bfloat16()})
        assert all(torch.equal(tensor, torch.full_like(tensor, 9)) for tensor in into.values())
        session.load_into(into)
    same(into, published)


def test_buckets_are_taken_while_targets_are_found(published, store, monkeypatch):
    """And those that were taken for a load that is refused are handed out."""
    monkeypatch.setattr(_prefetch, "_FEWEST", 0)
    with attach(store) as session:
        seen, taken = [], threading.Event()
        call = session._native.call

        def noted(function, *arguments):
            call(function, *arguments)
            if function == "rk_prefetch":
                seen.append(arguments[0])
                taken.set()

        def prepare(*arguments):
            assert taken.wait(60)  # by then it has all that it may
            raise rekindle.InvalidError("refused")

        session._native.call = noted
        with monkeypatch.context() as patch:
            patch.setattr(_loading, "_prepare", prepare)
            patch.setattr(_prefetch, "_BYTES_A_TENSOR", MIB // 8)
            with pytest.raises(rekindle.InvalidError, match="refused"):
                session.load_into(targets(published))
        assert seen[0] == (len(published) + 1) * MIB // 8
        same({name: tensor.clone() for name, tensor in session}, published)
        session.commit(timeout=60)


def test_a_prefetch_ends_with_its_session(published, store, monkeypatch):
    monkeypatch.setattr(_prefetch, "_FEWEST", 0)
    session = attach(store)

    def prepare(*arguments):
        session.close()
        raise rekindle.InvalidError("refused")

    monkeypatch.setattr(_loading, "_prepare", prepare)
    with pytest.raises(rekindle.InvalidError, match="refused"):
        session.load_into(targets(published))
    assert not [thread for thread in threading.enumerate() if thread.name == "rekindle-prefetch"]


def test_boxes_are_keys(published, store):
    boxes = [Box("large", (0, 0), (10, 1024)), Box("large", (1000, 100), (500, 24)),
             Box("layer.00.w", (0, 64), (64, 32)), Box("half")]
    into = {box: torch.zeros(box.extent or (33, 7)) for box in boxes}
    into[boxes[3]] = into[boxes[3]].bfloat16()
    with attach(store, shard=boxes) as session:
        with pytest.raises(rekindle.InvalidError, match="2 boxes of 'large'"):
            session.load_into({"large": torch.zeros(1)})
        session.load_into(into)
        session.commit(timeout=60)
    for box in boxes[:3]:
        at = tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent))
        assert torch.equal(into[box], published[box.tensor][at]), box
    assert torch.equal(into[boxes[3]], published["half"])
    with attach(store, shard=boxes) as session:
        found = {info.box: tensor.clone() for info, tensor in session.entries(timeout=60)}
    assert all(torch.equal(found[box], into[box]) for box in boxes[:3])


def test_a_box_twice_is_loaded_once(published, store):
    box = Box("large", (5, 0), (10, 1024))
    into = torch.zeros(10, 1024)
    with attach(store, shard=[box, box]) as session:
        session.load_into({box: into})
    assert torch.equal(into, published["large"][5:15])


def test_close_in_the_middle_ends_it_and_another_session_has_all(published, store):
    session = attach(store)
    iterator = iter(session)
    next(iterator)
    session.close()
    with pytest.raises(rekindle.StaleError):
        next(iterator)
    with pytest.raises(rekindle.StaleError):
        session.load_into(targets(published))
    into = targets(published)
    with attach(store) as again:
        again.load_into(into)
    same(into, published)


def test_memory_of_a_double_is_a_torch_tensor():
    memory = torch.arange(64, dtype=torch.uint8)
    view = device_tensor(memory.data_ptr(), 64, "double:0")
    assert view.dtype == torch.uint8 and view.shape == (64,)
    view[3] = 200
    assert memory[3] == 200


def test_both_devices_at_once_by_threads(published, store):
    from concurrent.futures import ThreadPoolExecutor

    def load(rank):
        into = targets(published)
        with rekindle.attach("m", device=f"double:{rank}", instance="two", rank=rank, world=2,
                             agent=store) as session:
            session.load_into(into)
            session.commit(timeout=60)
        return into

    with ThreadPoolExecutor(2) as pool:
        for into in pool.map(load, range(2)):
            same(into, published)
