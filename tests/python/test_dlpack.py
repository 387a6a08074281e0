"""What DLPack says of tensors is what torch says, and nothing depends on who was asked."""
import ctypes

import pytest
import torch
from rekindle import _dlpack, _plain, dtypes, recording
from recording_fakes import catalog_of
from stand_in import StandIn

NOT_IN_DLPACK = {
    "meta": lambda: torch.empty(3, device="meta"), "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(), "mkldnn": lambda: torch.ones(3, 4).to_mkldnn()}
KINDS = {
    "plain": lambda: torch.ones(3, 4), "no dimensions": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4), "empty inside": lambda: torch.empty(3, 0, 2),
    "expanded": lambda: torch.ones(3, 1).expand(3, 4), "transposed": lambda: torch.ones(3, 4).t(),
    "one row, transposed": lambda: torch.ones(1, 4).t(), "slice": lambda: torch.ones(6, 4)[2:5],
    "gaps": lambda: torch.ones(6, 4)[:, 1:3], "one of each": lambda: torch.ones(4, 3)[:, :1],
    "channels last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "negative, dense": lambda: torch._neg_view(torch.ones(3, 4).bfloat16()),
    "parameter": lambda: torch.nn.Parameter(torch.ones(5)),
    "of a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "many dimensions": lambda: torch.ones([1, 2] * 12),
    "freed": lambda: freed(torch.ones(4)), "zero": lambda: torch._efficientzerotensor(3)}


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.fixture
def capsule():
    """Of this torch."""
    found = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if found is None:
        pytest.skip("torch before 2.10 has no C exchange API: nothing is described by it")
    return found


@pytest.fixture
def hidden(monkeypatch):
    """As of an older torch."""
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    _dlpack._exporter.cache_clear()
    yield
    _dlpack._exporter.cache_clear()


def described(*tensors):
    return _dlpack.describe(tensors, torch.Tensor.is_neg)


def dims(layouts, column):
    end, found = 0, []
    for rank in layouts.ranks:
        found.append(tuple(column[end:end + rank]))
        end += rank
    assert end == len(column)
    return found


def check(tensors):
    layouts = described(*tensors)
    assert layouts.data.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert dims(layouts, layouts.shapes) == [tuple(tensor.shape) for tensor in tensors]
    assert dims(layouts, layouts.strides) == [tensor.stride() for tensor in tensors]
    assert [one == 1 for one in layouts.contiguous] == [one.is_contiguous() for one in tensors]
    assert layouts.answers == [tensor.is_neg() for tensor in tensors]
    assert set(layouts.devices) == {layouts.devices[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_one_is_what_torch_says(kind, capsule):
    check([KINDS[kind]()])


def test_what_is_said_of_many_is_what_torch_says(capsule):
    tensors = [make() for make in KINDS.values()] * 300  # more than are asked at once
    assert len(tensors) > 2 * _dlpack._BLOCK
    check(tensors)


@pytest.mark.parametrize("kind", NOT_IN_DLPACK)
def test_what_dlpack_does_not_have_is_left_to_torch(kind, capsule):
    assert described(torch.ones(2), NOT_IN_DLPACK[kind](), torch.ones(2)) is None


def test_a_dtypes_word_is_its_own_or_torch_is_asked(capsule):
    words = {}
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        try:
            layouts = described(torch.empty(2, dtype=dtype))
        except (RuntimeError, NotImplementedError):  # it is made in another way
            continue
        if layouts is not None:
            words.setdefault(layouts.dtypes[0], []).append(dtype)
    several = {word for word, found in words.items() if len(found) > 1}
    assert several <= _dlpack.SHARED_WORDS and len(words) > 15
    for name in dtypes._ENTRIES:
        word, = _dlpack.dtype_words([name])
        if word:
            assert dtypes.torch_dtype(name) in words[word], name
        assert _dlpack.shares_word(name) == (name in ("I8", "U8"))


class Header(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
                ("functions", ctypes.c_void_p * 5)]


def capsule_of(header, name=b"dlpack_exchange_api"):
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(header), name, None)


def test_another_major_version_is_not_called():
    functions = (ctypes.c_void_p * 5)(1, 2, 3, 44, 5)
    ours = Header(1, 9, None, functions)
    newer = Header(2, 0, ctypes.addressof(ours), (ctypes.c_void_p * 5)(6, 7, 8, 9, 10))
    assert _dlpack.exporter_of(capsule_of(ours)) == 44
    assert _dlpack.exporter_of(capsule_of(newer)) == 44
    assert _dlpack.exporter_of(capsule_of(Header(2, 0, None, functions))) is None
    without = (ctypes.c_void_p * 5)(1, 2, 3, None, 5)  # a producer need not have it
    assert _dlpack.exporter_of(capsule_of(Header(1, 3, None, without))) is None
    with pytest.raises(ValueError):
        _dlpack.exporter_of(capsule_of(ours, b"dlpack"))


def test_an_older_torch_is_asked_itself(hidden):
    assert described(torch.ones(3)) is None


class Columns:
    """Of a session's tensors, as _plain reads them."""

    def __init__(self, entries):
        self.names = list(entries)
        self.dtypes = [dtype for dtype, _ in entries.values()]
        self.shapes = [shape for _, shape in entries.values()]
        self.ranks = [len(shape) for shape in self.shapes]
        self.nbytes = [bytes_of(dtype, shape) for dtype, shape in entries.values()]


def bytes_of(dtype, shape):
    count = 1
    for size in shape:
        count *= size
    return count * (1 if dtype == "F4" else dtypes.itemsize(dtype))


class Listing:
    files = ()

    def __init__(self, entries):
        self.columns, self.tensors = Columns(entries), range(len(entries))
        self.repeated, self.offsets = set(), [(0,) * len(shape) for _, shape in entries.values()]


def both(entries, items):
    """What DLPack and torch come to, which is the same."""
    listing = Listing(entries)
    keys, values = _plain._aligned(listing, items)
    device = torch.device("cpu")
    by_dlpack = _plain._described(listing, values, device)
    by_torch = _plain._asked(listing, values, device)
    if by_dlpack is not None:
        assert [bool(one) for one in by_dlpack[0]] == by_torch[0]
        assert by_dlpack[1] == by_torch[1]
    plain, rest = _plain.plain_targets(listing, items, "cpu")
    assert [keys[at] for at in plain.indices] == [key for key in keys
                                                  if key in items and key not in rest]
    return by_dlpack is not None, [keys[at] for at in plain.indices]


def test_targets_that_all_fit(capsule):
    entries = {f"w{i}": ("BF16", (2, 3)) for i in range(5000)}
    items = {name: torch.empty(2, 3, dtype=torch.bfloat16) for name in entries}
    assert both(entries, items) == (True, list(entries))


MISFITS = {
    "shape": torch.ones(3, 4), "shape of as many": torch.ones(3, 2), "rank": torch.ones(6),
    "dtype": torch.ones(2, 3, dtype=torch.float64), "strides": torch.ones(3, 2).t(),
    "negative": torch._neg_view(torch.ones(2, 3)), "nothing": None,
    "a list": [torch.ones(2, 3)] * 2,
    "a number": 3, "array": torch.ones(2, 3).numpy()}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_target_that_does_not_fit_is_left_out(kind, capsule):
    entries = {"a": ("F32", (2, 3)), "b": ("F32", (2, 3)), "c": ("F32", (2, 3))}
    items = {"a": torch.ones(2, 3), "b": MISFITS[kind], "c": torch.nn.Parameter(torch.ones(2, 3))}
    assert both(entries, items) == (True, ["a", "c"])


@pytest.mark.parametrize("value, by_dlpack", [
    (torch.empty(2, 3, device="meta"), False), (StandIn(torch.ones(2, 3)), True)],
    ids=["meta", "stand-in"])
def test_a_target_that_is_not_described_leaves_the_others(value, by_dlpack, capsule):
    entries = {"a": ("F32", (2, 3)), "b": ("F32", (2, 3))}
    assert both(entries, {"a": torch.ones(2, 3), "b": value}) == (by_dlpack, ["a"])


def test_dtypes_that_share_a_word_are_told_apart(capsule):
    int1 = getattr(torch, "int1", None)
    if int1 is None:
        pytest.skip("this torch has no integers of less than a byte")
    entries = {"a": ("I8", (2,)), "b": ("I8", (2,)), "c": ("U8", (2,)), "d": ("F32", (2,))}
    items = {"a": torch.empty(2, dtype=torch.int8), "b": torch.empty(2, dtype=int1),
             "c": torch.empty(2, dtype=torch.int8), "d": torch.ones(2)}
    assert both(entries, items) == (True, ["a", "d"])


def test_packed_bits_are_never_plain(capsule):
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is None:
        pytest.skip("this torch has no packed floats")
    entries = {"a": ("F4", (2,)), "b": ("F32", (2,))}
    items = {"a": torch.empty(2, dtype=packed), "b": torch.ones(2)}
    assert both(entries, items) == (True, ["b"])


def test_empty_and_tied_targets(capsule):
    entries = {"a": ("F32", (0, 3)), "b": ("F32", (2,)), "c": ("F32", (2,)), "d": ("F32", ())}
    tied = torch.ones(2)
    items = {"a": torch.empty(0, 3), "b": tied, "c": tied, "d": torch.tensor(1.0)}
    listing = Listing(entries)
    plain, rest = _plain.plain_targets(listing, items, "cpu")
    assert (list(plain.indices), list(rest)) == ([1, 3], ["a", "c"])
    assert plain.addresses == [tied.data_ptr(), items["d"].data_ptr()]


def test_without_the_capsule_the_same_targets_are_plain(hidden):
    entries = {"a": ("F32", (2, 3)), "b": ("F32", (2, 3)), "c": ("F32", (6,))}
    items = {name: torch.ones(2, 3) for name in entries}
    assert both(entries, items) == (False, ["a", "b"])


# --- fingerprints

def mark(targets):
    catalog = catalog_of({"w": torch.empty(2)})
    return recording.fingerprint(catalog, targets, (), {})


def targets_of(memory):
    return {"a": memory[:4].view(2, 2), "b": memory[8:12].view(2, 2), "c": torch.ones(3),
            "d": torch.ones(4, dtype=torch.int8)}


DIFFERENCES = {
    "name": lambda t: {("other" if name == "c" else name): one for name, one in t.items()},
    "order": lambda t: dict(reversed(t.items())),
    "shape": lambda t: {**t, "c": torch.ones(4)},
    "rank": lambda t: {**t, "a": t["a"].view(4)},
    "stride": lambda t: {**t, "a": t["a"].t()},
    "dtype": lambda t: {**t, "c": torch.ones(3, dtype=torch.int32)},
    "dtype of the same word": lambda t: {**t, "d": torch.empty(4, dtype=torch.int1)},
    "device": lambda t: {**t, "c": torch.ones(3, device="meta")},
    "apart": lambda t: {**t, "b": torch.ones(16)[8:12].view(2, 2)},
    "another's storage": lambda t: {**t, "c": t["b"].view(4)[:3]},
    "place": lambda t: {**t, "b": t["b"].as_strided((2, 2), (2, 1), 4)},
    "place in a storage of its own": lambda t: {**t, "c": torch.ones(4)[1:]}}


@pytest.mark.parametrize("asked", ["dlpack", "torch"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_difference_is_another_fingerprint(difference, asked, request):
    request.getfixturevalue("capsule" if asked == "dlpack" else "hidden")
    targets = targets_of(torch.ones(16))
    try:
        other = DIFFERENCES[difference](targets)
    except AttributeError:
        pytest.skip("this torch has no such dtype")
    assert mark(other) != mark(targets)


@pytest.mark.parametrize("asked", ["dlpack", "torch"])
def test_the_same_model_built_again_has_the_same_fingerprint(asked, request):
    request.getfixturevalue("capsule" if asked == "dlpack" else "hidden")
    kept = [torch.ones(5)]
    for make in (targets_of, lambda memory: dict(enumerate(memory.view(4, 4))),
                 lambda memory: {str(i): torch.ones(3) for i in range(9)},
                 lambda memory: {"a": torch.empty(0), "b": torch.empty(0, 2)},
                 lambda memory: {"a": torch.nn.Parameter(memory), "b": memory}):
        first = make(torch.ones(16))
        kept.append(first)  # so that the second has other memory
        first, second = ({str(key): one for key, one in found.items()}
                         for found in (first, make(torch.ones(16))))
        assert mark(first) == mark(second)


def test_two_storages_of_one_memory_are_not_one(capsule):
    memory = torch.ones(6).numpy()
    one = torch.from_numpy(memory)
    assert mark({"a": one, "b": torch.from_numpy(memory)}) != mark({"a": one, "b": one})


def test_storages_without_memory_are_told_apart(capsule):
    empty = torch.empty(0)
    assert mark({"a": empty, "b": torch.empty(0)}) != mark({"a": empty, "b": empty[:0]})
    memory = torch.ones(4)
    alone = {"a": torch.ones(4), "b": torch.empty(0)}
    assert mark({"a": memory, "b": memory[:0]}) != mark(alone)
