"""Tensors in many layouts, and places in host memory that they are copied to."""
import ctypes

import numpy
import torch

from rekindle import dtypes

DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32",
          "U32", "F32", "I64", "U64", "F64"]


def patterns(name, *shape):
    """Elements with every byte there is: NaNs, denormals and all."""
    count = int(numpy.prod(shape, dtype=int))
    raw = torch.arange(count * dtypes.itemsize(name), dtype=torch.int64) * 37 % 251
    if name == "BOOL":
        return (raw % 2 == 0).reshape(shape)
    return raw.to(torch.uint8).view(dtypes.torch_dtype(name)).reshape(shape)


def layouts(name):
    """The same elements in several layouts."""
    whole = patterns(name, 6, 10, 8)
    yield from (whole, whole.permute(2, 0, 1), whole[::2, 1::3], whole[:, 2:7], whole[3, 4, 5],
                whole[:0], whole[0, :1].expand(5, 8), patterns(name, 7)[1:])


def raw(tensor):
    if isinstance(tensor, torch.Tensor):
        flat = tensor.detach().resolve_neg().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).tolist())
    return bytes(tensor.tobytes())


def places_for(tensors, gap=3):
    """One after the other, after a gap of bytes that nothing may write to."""
    nbytes = [tensor.nbytes for tensor in tensors]
    memory = (ctypes.c_char * (sum(nbytes) + gap * (len(nbytes) + 1)))()
    ctypes.memset(memory, 0xEE, len(memory))
    places, at = [], gap
    for size in nbytes:
        places.append((ctypes.c_char * size).from_buffer(memory, at))
        at += size + gap
    return memory, places


def expected(tensors, gap=3):
    between = b"\xee" * gap
    return between + b"".join(raw(tensor) + between for tensor in tensors)
