"""Assembles whole tensors from the parts of several ranks, element by element."""
import numpy
import torch

from rekindle import dtypes


def assembled(parts):
    """Returns {name: tensor} from (name, dtype, shape, offset, extent, elements). Fails if an
    element is missing, or if two parts give it different bits."""
    wholes = {}
    for name, dtype, shape, offset, extent, elements in parts:
        assert tuple(elements.shape) == extent and 0 not in extent, (name, elements.shape, extent)
        assert elements.dtype is dtypes.torch_dtype(dtype), name
        size = dtypes.itemsize(dtype)
        if name not in wholes:
            wholes[name] = (numpy.zeros((*shape, size), numpy.uint8),
                            numpy.zeros(shape, bool), dtype, shape)
        raw, there, kind, of = wholes[name]
        assert (kind, of) == (dtype, shape), name
        box = tuple(slice(start, start + count) for start, count in zip(offset, extent))
        bits = elements.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(*extent, size)
        known = there[box]
        assert (raw[box][known] == bits[known]).all(), f"{name} {box}: two values"
        raw[box], there[box] = bits, True
    for name, (_, there, *_) in wholes.items():
        assert there.all(), f"{name}: no rank has {numpy.argwhere(~there)[:3].tolist()}"
    return {name: torch.from_numpy(raw).flatten().view(dtypes.torch_dtype(dtype)).view(shape)
            for name, (raw, _, dtype, shape) in wholes.items()}


def read(parts):
    return [(*part[:-1], part.read()) for part in parts]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].contiguous().flatten().view(torch.uint8),
                           tensor.detach().contiguous().flatten().view(torch.uint8)), name
