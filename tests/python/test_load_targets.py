"""What load_into finds at once, and what it looks at one by one, come to the same."""
import ctypes
import os
import pathlib
import signal

import pytest
import torch
from conftest import eventually
from stand_in import StandIn

import rekindle
from rekindle import Box, _abi, _listing, _plain, _targets
from rekindle._targets import items_of


@pytest.fixture(scope="module")
def published(fleet, store):
    generator = torch.Generator().manual_seed(5)
    known = {f"l.{i:03}.w": torch.randn(8, 3 + i % 5, generator=generator) for i in range(300)}
    known["head"] = known["l.007.w"].clone()
    known["empty"] = torch.zeros(0, 4)
    rekindle.publish(known, "m@1", files={"config.json": b"{}"}, agent=store)
    return known


@pytest.fixture(params=["at-once", "one-by-one"])
def session(request, published, store, monkeypatch):
    if request.param == "one-by-one":
        from rekindle import _loading
        monkeypatch.setattr(_loading, "plain_targets",
                            lambda listing, items, device: (_plain.NOTHING, items))
    with rekindle.attach("m", device="double:0", agent=store) as session:
        yield session


def empty(known):
    return {name: torch.full_like(tensor, 9) for name, tensor in known.items()}


def same(found, known):
    for name, tensor in known.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_nearly_all_are_found_at_once(published, store):
    with rekindle.attach("m", device="double:0", agent=store) as session:
        into = {**empty(published), "l.008.w": torch.zeros(8, 6, dtype=torch.float64)}
        plain, rest = _plain.plain_targets(session._catalog(), into, "cpu")
        assert rest.keys() == {"l.008.w", "empty"} and len(plain.indices) == 300
        assert [session._catalog().infos[index].name for index in plain.indices] == [
            name for name in sorted(published) if name not in rest]


def test_every_kind_of_target_is_filled(session, published):
    into = empty(published)
    into["l.001.w"] = [into["l.001.w"]]
    into["l.002.w"] = [torch.zeros(8, 5), torch.zeros(8, 5)]
    into["l.003.w"] = torch.nn.Parameter(into["l.003.w"])
    into["l.004.w"] = torch.zeros(8, 7, dtype=torch.complex64).conj().imag
    into["l.011.w"] = torch.zeros(4, 8).t()
    assert into["l.004.w"].is_neg()
    assert session.load_into(into) == ([], [])
    into["l.001.w"] = into["l.001.w"][0]
    assert torch.equal(into["l.002.w"][0], into["l.002.w"][1])
    into["l.002.w"] = into["l.002.w"][1]
    same(into, published)


def test_boxes_and_names_mean_the_same(session, published):
    into = empty(published)
    whole = published["l.005.w"]
    into[Box("l.005.w", (0, 0), tuple(whole.shape))] = into.pop("l.005.w")
    into[Box("l.006.w")] = into.pop("l.006.w")
    into[Box("l.010.w", (0, 0), (8, 3))] = other = torch.zeros(8, 3)
    assert session.load_into(into) == ([], [])
    assert torch.equal(other, published["l.010.w"])
    into["l.005.w"] = into[Box("l.005.w", (0, 0), tuple(whole.shape))]
    into["l.006.w"] = into[Box("l.006.w")]
    same(into, published)


def test_a_tied_name_that_the_session_lacks_is_found(session, published):
    into = empty(published)
    into["tied"] = into["l.000.w"]
    into["not tied"] = into["l.000.w"][:, :2]
    with pytest.raises(rekindle.NotFoundError, match="'not tied' of the targets"):
        session.load_into(into)
    del into["not tied"]
    assert session.load_into(into) == ([], [])
    same(into, published)


def test_the_same_memory_by_two_names_is_written_once(session, published):
    into = empty(published)
    into["head"] = into["l.007.w"]
    assert session.load_into(into) == ([], [])
    same(into, published)


def test_what_is_wrong_is_named_before_anything_is_written(session, published):
    into = empty(published)
    for wrong, error, words in [
            ({"l.009.w": torch.zeros(8, 6)}, rekindle.InvalidError, "'l.009.w' has shape"),
            ({"l.009.w": torch.zeros(8, 7, device="meta")}, rekindle.InvalidError, "meta"),
            ({"l.009.w": 3}, rekindle.InvalidError, "not a tensor"),
            ({7: torch.zeros(1)}, rekindle.InvalidError, "7 is no name"),
            ({"other": torch.zeros(1)}, rekindle.NotFoundError, "'other' of the targets")]:
        with pytest.raises(error, match=words):
            session.load_into({**into, **wrong})
    missing = {name: tensor for name, tensor in into.items() if name != "l.100.w"}
    with pytest.raises(rekindle.NotFoundError, match="'l.100.w' of m@1 has no target"):
        session.load_into(missing)
    assert all(torch.equal(tensor, torch.full_like(tensor, 9)) for tensor in into.values())
    result = session.load_into({**missing, "other": torch.zeros(1)}, strict=False)
    assert result == (["'other'"], ["'l.100.w'"])
    same({**into, "l.100.w": published["l.100.w"]}, published)


def test_a_name_of_several_boxes_is_no_key(published, store):
    boxes = [Box("l.000.w", (0, 0), (8, 1)), Box("l.000.w", (0, 1), (8, 2)), "l.001.w"]
    right = {boxes[0]: torch.zeros(8, 1), boxes[1]: torch.zeros(8, 2), "l.001.w": torch.zeros(8, 4)}
    with rekindle.attach("m", device="double:0", agent=store, shard=boxes) as session:
        with pytest.raises(rekindle.InvalidError, match="2 boxes of 'l.000.w'"):
            session.load_into({"l.000.w": torch.zeros(8, 2), "l.001.w": torch.zeros(8, 4)})
        assert session.load_into(right) == ([], [])
    whole = torch.cat([right[boxes[0]], right[boxes[1]]], 1)
    assert torch.equal(whole, published["l.000.w"])


class Odd(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "other"] = self.weight


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"not": "a tensor"}


def renamed(module):
    module.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({prefix + "hooked": module.weight}))
    return module


@pytest.mark.parametrize("odd", [
    None, Odd(2, 2), Extra(2, 2), renamed(torch.nn.Linear(2, 2)), torch.jit.script(
        torch.nn.Linear(2, 2))], ids=["plain", "overridden", "extra", "hook", "script"])
def test_a_modules_items_are_those_of_its_state_dict(odd):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False))
    module.tied = module[1]
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("transient", torch.ones(1), persistent=False)
    module.nothing = None
    if odd is not None:
        module.odd = odd
    wanted = {name: value for name, value in module.state_dict(keep_vars=True).items()
              if isinstance(value, torch.Tensor)}
    found = items_of(module)
    assert found.keys() == wanted.keys() and len(found) >= 8
    assert all(found[name].data_ptr() == wanted[name].data_ptr() for name in wanted)
    assert _targets._add_state(module, "", {}, {}) == (odd is None)


def test_infos_that_were_not_asked_for_end_with_the_session(published, store):
    session = rekindle.attach("m", device="double:0", agent=store)
    session.load_into(empty({name: t for name, t in published.items() if name != "head"}),
                      strict=False)
    listing = session._catalog()
    listing.__dict__.pop("infos", None)
    session.close()
    with pytest.raises(rekindle.StaleError):
        session.tensors()


def children(process):
    return [int(child) for child in pathlib.Path(
        f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def stopped(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def test_a_load_that_ran_out_of_time_goes_on(fleet, store):
    known = {f"w{i}": torch.full((600, 1000), float(i)) for i in range(20)}
    rekindle.publish(known, "long@1", agent=store)
    into = {**empty(known), "w3": torch.zeros(600, 1000, dtype=torch.float64)}
    device_process, = children(fleet.agents["a"])
    with rekindle.attach("long", device="double:0", bucket_bytes=1 << 20, agent=store) as session:
        os.kill(device_process, signal.SIGSTOP)
        try:
            eventually(lambda: stopped(device_process))
            with pytest.raises(rekindle.TimeoutError):
                session.load_into(into, timeout=0.2)
            with pytest.raises(rekindle.InvalidError, match="with other targets"):
                session.load_into(empty(known))
        finally:
            os.kill(device_process, signal.SIGCONT)
        assert session.load_into(into) == ([], [])
        session.commit(timeout=60)
    same(into, known)
    assert into["w3"].dtype == torch.float64


def test_a_tensor_that_stands_for_others_is_refused_before_anything_is_written(session, published):
    into = empty(published)
    into["l.001.w"] = StandIn(into["l.001.w"])
    with pytest.raises(rekindle.InvalidError, match="'l.001.w' is a StandIn, which has no memory"):
        session.load_into(into)
    assert torch.equal(into["head"], torch.full_like(into["head"], 9))


def columns_of(entries):
    """A session's rk_tensors, of (name, address of dimensions, rank); and what has to be kept."""
    texts = [ctypes.create_string_buffer(name.encode()) for name, _, _ in entries]
    dtype = ctypes.create_string_buffer(b"U8")
    memory = bytearray(b"\xff" * _abi.TENSOR.size * len(entries))  # padding is anything
    for at, (text, (_, dims, rank)) in enumerate(zip(texts, entries)):
        whole = _abi.Tensor.from_buffer(memory, at * _abi.TENSOR.size)
        whole.name, whole.dtype = ctypes.addressof(text), ctypes.addressof(dtype)
        whole.dimensions, whole.shape, whole.offset, whole.full_shape = rank, dims, dims, dims
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    return _listing.Columns(ctypes.addressof(view), len(entries), {}), (texts, dtype, view)


def test_files_and_shapes_are_found_wherever_they_are():
    dims = (ctypes.c_uint64 * 2)(3, 4)
    first, second = ctypes.addressof(dims), ctypes.addressof(dims) + 8
    file = _abi.FILE_PREFIX
    columns, kept = columns_of([
        (f"{file}a", first, 1), ("x", first, 2), (f"x{file}", second, 1), (f"{file}b", first, 0),
        (f"{file}é", second, 1), ("é", first, 2), (f"{file}z", second, 1)])
    assert columns.beginning_with(file) == [0, 3, 4, 6]
    assert columns.names[2] == f"x{file}" and len(columns.names) == 7
    assert columns.shapes == [(3,), (3, 4), (4,), (), (4,), (3, 4), (4,)]
    assert list(columns.ranks) == [1, 2, 1, 0, 1, 2, 1]
    empty, kept = columns_of([])
    assert (empty.names, empty.shapes, empty.beginning_with(file)) == ([], [], [])
