"""Sessions without agents, and the check that every test of the recorder makes."""
import random
import weakref

import torch
from rekindle import TensorInfo, dtypes, recording
from torch.utils._python_dispatch import TorchDispatchMode


class FakeSession:
    """The part of a Session in host memory that execute() uses, over tensors that are here: what it
    gives are views of these. It counts what was fetched.
    """

    model, version, device = "fake", 1, None

    def __init__(self, tensors, boxes):
        self._entries = []
        for name, offset, extent in boxes:
            whole = tensors[name]
            part = whole
            for k, (start, count) in enumerate(zip(offset, extent)):
                part = part.narrow(k, start, count)
            info = TensorInfo(name, dtypes.dtype_name(whole.dtype), tuple(part.shape),
                              tuple(offset) or (0,) * whole.dim(), tuple(whole.shape), part.nbytes)
            self._entries.append((info, part.contiguous()))
        starts = [(info.name, info.offset) for info, _ in self._entries]
        assert len(set(starts)) == len(starts), "the C ABI tells boxes apart by where they begin"
        self.fetched = sum(info.nbytes for info, _ in self._entries)

    def tensors(self):
        return [info for info, _ in self._entries]

    def entries(self, timeout=None):
        """As they arrive: in any order."""
        return iter(random.Random(3).sample(self._entries, len(self._entries)))


def catalog_of(tensors):
    return {name: recording.TensorMeta(tuple(t.shape), t.dtype) for name, t in tensors.items()}


class LiveBytes(TorchDispatchMode):
    """As a context: how many bytes of tensors that were made in it live at once, at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and func.name().startswith("aten::empty"):
            storage = result.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            assert key not in self._known
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(result, self._gone, key, size)
        return result

    def _gone(self, key, size):
        self._known.discard(key)
        self.now -= size


def garbage(like):
    """Of the same layout, with bytes that no loader writes."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
    made.view(torch.uint8).fill_(0x5A) if made.dim() and made.is_contiguous() else made.fill_(77)
    return made


def same_bits(one, other):
    return torch.equal(one.contiguous().flatten().view(torch.uint8),
                       other.contiguous().flatten().view(torch.uint8))


def check(make, tensors):
    """Records `make()` = (load, targets), executes the plan, and compares with the loader on real
    tensors.

    Returns (plan, bytes that were fetched).
    """
    load, wanted = make()
    for target in wanted.values():
        target.copy_(garbage(target))
    with torch.no_grad():
        load((name, tensor.clone()) for name, tensor in tensors.items())
    load, recorded_on = make()
    plan = recording.record(load, catalog_of(tensors), recorded_on)
    load, targets = make()
    for target in targets.values():
        target.copy_(garbage(target))
    session = FakeSession(tensors, recording.boxes(plan))
    recording.execute(plan, load, targets, session)
    for name, target in targets.items():
        assert same_bits(target, wanted[name]), f"{name} differs"
    return plan, session.fetched
