"""The C ABI of librekindle (rekindle.h, API version 1) in ctypes: only structures and prototypes.

Other modules read and write long arrays of structures with `struct`. load() checks the formats for
that against the structures here.
"""
from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import (
    POINTER, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64,
    c_void_p)
from collections.abc import Mapping
from typing import Any, TypeVar

from . import _library
from .errors import UnavailableError

API_VERSION = 1
OK = 0
TIMEOUT = 3
EXHAUSTED = 7
UNAVAILABLE = 9
FILE_PREFIX = "__rekindle_file__/"


class Error(ctypes.Structure):
    _fields_ = [("code", c_int32), ("message", c_char * 1020)]


class ConnectOptions(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("store", c_char_p), ("timeout_ms", c_int64)]


class Box(ctypes.Structure):
    _fields_ = [("tensor", c_void_p), ("dimensions", c_uint32), ("offset", c_void_p),
                ("extent", c_void_p)]


class AttachOptions(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("model", c_char_p), ("shard", c_char_p),
                ("spec_json", c_char_p), ("boxes", c_void_p), ("box_count", c_size_t),
                ("instance", c_char_p), ("generation", c_uint64), ("rank", c_uint32),
                ("world", c_uint32), ("fallback_dir", c_char_p), ("timeout_ms", c_int64),
                ("device", c_char_p), ("stream", c_void_p), ("bucket_bytes", c_uint64),
                ("group", c_char_p), ("staged", c_uint32), ("traceparent", c_char_p),
                ("resident_key", c_char_p), ("resident_shared", c_uint32)]


class SessionInfo(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("model", c_char_p), ("version", c_uint64),
                ("bytes_done", c_uint64), ("bytes_total", c_uint64), ("tensors", c_uint32),
                ("rung", c_char_p), ("device_path", c_char_p)]


class SessionVersion(ctypes.Structure):
    """The first fields of SessionInfo: the library fills no more."""

    _fields_ = [("size", c_uint32), ("model", c_char_p), ("version", c_uint64)]


class Tensor(ctypes.Structure):
    _fields_ = [("name", c_void_p), ("dtype", c_void_p), ("dimensions", c_uint32),
                ("shape", c_void_p), ("offset", c_void_p), ("full_shape", c_void_p),
                ("data", c_void_p), ("bytes", c_uint64)]


class Part(ctypes.Structure):
    _fields_ = [("tensor", c_void_p), ("offset_bytes", c_uint64), ("bytes", c_uint64),
                ("data", c_void_p), ("reserved", c_uint64 * 2)]


class Target(ctypes.Structure):
    _fields_ = [("tensor", c_void_p), ("offset", c_void_p), ("data", c_void_p),
                ("bytes", c_uint64), ("reserved", c_uint64 * 2)]


class TensorSpec(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("dtype", c_char_p), ("dimensions", c_uint32),
                ("shape", POINTER(c_uint64))]


class JointOptions(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("model_version", c_char_p), ("rank", c_uint32),
                ("world", c_uint32), ("timeout_ms", c_int64)]


class PublishedPart(ctypes.Structure):
    _fields_ = [("tensor", TensorSpec), ("offset", POINTER(c_uint64)),
                ("extent", POINTER(c_uint64))]


class Piece(ctypes.Structure):
    _fields_ = [("offset", POINTER(c_uint64)), ("extent", POINTER(c_uint64)), ("data", c_void_p),
                ("bytes", c_uint64)]


class Copy(ctypes.Structure):
    _fields_ = [("target", c_void_p), ("source", c_void_p), ("bytes", c_uint64)]


class UpdateOptions(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("model_version", c_char_p), ("group", c_char_p),
                ("gather_ms", c_int64), ("timeout_ms", c_int64), ("members", c_uint32)]


class Phase(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("elapsed_us", c_uint64)]


class PhaseSummary(ctypes.Structure):
    _fields_ = [("name", c_char * 16), ("median_us", c_uint64), ("p95_us", c_uint64),
                ("slowest_us", c_uint64), ("slowest", c_char * 232)]


class UpdateResult(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("members", c_uint32), ("ready", c_uint32),
                ("by_broadcast", c_uint32), ("elapsed_ms", c_uint64), ("phase_count", c_uint32),
                ("phases", PhaseSummary * 6)]


class Order(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("kind", c_uint32), ("number", c_uint64), ("model", c_char_p),
                ("tensors", POINTER(c_char_p)), ("tensor_count", c_size_t)]


class TensorLayout(ctypes.Structure):
    _fields_ = [("data", c_uint64), ("device_type", c_int32), ("device_id", c_int32),
                ("dtype_code", c_uint8), ("dtype_bits", c_uint8), ("dtype_lanes", c_uint16),
                ("dimensions", c_uint32), ("first_dimension", c_uint64), ("contiguous", c_uint32),
                ("reserved", c_uint32)]


# Formats of the structures that come in long arrays.
BOX = struct.Struct("@PI4xPP")
TENSOR = struct.Struct("@PPI4xPPPPQ")
PART = struct.Struct("@PQQP16x")
TARGET = struct.Struct("@PPPQ16x")
COPY = struct.Struct("@PPQ")
TENSOR_LAYOUT = struct.Struct("@QiiBBHIQII")

_Library = TypeVar("_Library", bound=ctypes.CDLL)  # or a PyDLL
_HANDLE = c_void_p
_OUT_HANDLE = POINTER(c_void_p)
_ERROR = POINTER(Error)
_COUNT = POINTER(c_size_t)
_PROTOTYPES = {
    "rk_api_version": (c_uint32,),
    "rk_library_version": (c_char_p,),
    "rk_code_name": (c_char_p, c_int32),
    "rk_connect": (c_int32, POINTER(ConnectOptions), _OUT_HANDLE, _ERROR),
    "rk_interrupt": (None, _HANDLE),
    "rk_disconnect": (None, _HANDLE),
    "rk_attach": (c_int32, _HANDLE, POINTER(AttachOptions), _OUT_HANDLE, _ERROR),
    # A SessionInfo, or a SessionVersion.
    "rk_info": (c_int32, _HANDLE, c_void_p, _ERROR),
    "rk_next": (c_int32, _HANDLE, c_int64, _OUT_HANDLE, _COUNT, _ERROR),
    "rk_tensors": (c_int32, _HANDLE, _OUT_HANDLE, _COUNT, _ERROR),
    "rk_tensor_count": (c_int32, _HANDLE, _COUNT, _ERROR),
    "rk_catalog": (c_int32, _HANDLE, _OUT_HANDLE, _COUNT, _ERROR),
    "rk_next_bucket": (c_int32, _HANDLE, c_int64, _OUT_HANDLE, _COUNT, _ERROR),
    "rk_load_into": (c_int32, _HANDLE, c_void_p, c_size_t, c_int64, _ERROR),
    "rk_prefetch": (c_int32, _HANDLE, c_uint64, c_int64, _ERROR),
    "rk_stage": (c_int32, _HANDLE, c_uint64, c_int64, _ERROR),
    "rk_begin_switch": (c_int32, _HANDLE, c_int64, _ERROR),
    "rk_report_phases": (c_int32, _HANDLE, POINTER(Phase), c_size_t, _ERROR),
    "rk_report_phases_ago": (c_int32, _HANDLE, POINTER(Phase), POINTER(c_uint64), c_size_t, _ERROR),
    "rk_loaded": (c_int32, _HANDLE, _ERROR),
    "rk_wait_commit": (c_int32, _HANDLE, c_int64, _ERROR),
    "rk_wait_update": (c_int32, _HANDLE, c_int64, POINTER(c_uint64), _ERROR),
    "rk_block_allocate": (c_int32, _HANDLE, c_uint64, _OUT_HANDLE, _ERROR),
    "rk_block_memory": (c_int32, _HANDLE, _OUT_HANDLE, POINTER(c_uint64), _ERROR),
    "rk_block_set_read_only": (c_int32, _HANDLE, c_uint32, _ERROR),
    "rk_block_free": (None, _HANDLE),
    "rk_resident": (c_int32, _HANDLE, _OUT_HANDLE, POINTER(c_uint64), _COUNT, _ERROR),
    "rk_resident_open": (c_int32, _HANDLE, _OUT_HANDLE, c_size_t, _ERROR),
    "rk_resident_seal": (c_int32, _HANDLE, c_char_p, c_char_p, c_uint64, _OUT_HANDLE, c_size_t,
                         c_int64, _ERROR),
    "rk_watch_order": (c_int32, _HANDLE, c_int64, POINTER(Order), _ERROR),
    "rk_order_done": (c_int32, _HANDLE, c_uint64, c_int32, c_char_p, POINTER(Phase), c_size_t,
                      _ERROR),
    "rk_detach": (None, _HANDLE),
    "rk_publish_begin": (c_int32, _HANDLE, c_char_p, POINTER(TensorSpec), c_size_t, _OUT_HANDLE,
                         _ERROR),
    "rk_publish_data": (c_int32, _HANDLE, c_size_t, POINTER(c_void_p), POINTER(c_uint64), _ERROR),
    "rk_publish_commit": (c_int32, _HANDLE, c_int64, _ERROR),
    "rk_publish_abandon": (None, _HANDLE),
    "rk_publish_begin_joint": (c_int32, _HANDLE, POINTER(JointOptions), POINTER(PublishedPart),
                               c_size_t, _OUT_HANDLE, _ERROR),
    "rk_publish_pieces": (c_int32, _HANDLE, c_size_t, POINTER(Piece), c_size_t, _COUNT, _ERROR),
    "rk_copies_open": (c_int32, _HANDLE, c_uint32, _OUT_HANDLE, _ERROR),
    "rk_copies_put": (c_int32, _HANDLE, c_void_p, c_size_t, POINTER(c_uint64), _ERROR),
    "rk_copies_wait": (c_int32, _HANDLE, c_uint64, c_int64, _ERROR),
    "rk_copies_close": (None, _HANDLE),
    "rk_update": (c_int32, _HANDLE, POINTER(UpdateOptions), POINTER(UpdateResult), _ERROR),
}
# These functions call Python's API, so load_for_python() loads them.
_PYTHON_PROTOTYPES = {
    "rk_describe_tensors": (c_int32, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p,
                            c_size_t, _COUNT, _ERROR),
}


@functools.lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    """Returns librekindle, loaded once. UnavailableError: it is missing or has another API
    version."""
    for layout, kind in ((BOX, Box), (TENSOR, Tensor), (PART, Part), (TARGET, Target), (COPY, Copy),
                         (TENSOR_LAYOUT, TensorLayout)):
        assert layout.size == ctypes.sizeof(kind), kind
    loaded = _load(ctypes.CDLL, _PROTOTYPES)
    if loaded.rk_api_version() != API_VERSION:
        raise UnavailableError(
            f"{_library.shared_object()} has API version {loaded.rk_api_version()}, this package "
            f"needs {API_VERSION}")
    return loaded


@functools.lru_cache(maxsize=None)
def load_for_python() -> ctypes.PyDLL:
    """Returns the library for calls with the GIL held, which may leave a Python exception."""
    load()
    return _load(ctypes.PyDLL, _PYTHON_PROTOTYPES)


def _load(kind: type[_Library], prototypes: Mapping[str, tuple[Any, ...]]) -> _Library:
    try:
        loaded = kind(_library.shared_object())
        for name, (result, *arguments) in prototypes.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as why:
        raise UnavailableError(
            f"librekindle cannot be loaded: {why}; install the wheel, or name it in "
            "REKINDLE_LIBRARY") from None
    return loaded
