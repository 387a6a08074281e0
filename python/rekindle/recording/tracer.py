"""Tensors without storage that know which elements of the checkpoint they stand for.

A `Traced` has the shape, strides, dtype and device of the real tensor. Each operation on it runs on
a tensor on `meta`. If the result shares its storage, it is a view, and torch itself gives its
offset, size and stride. So every view operation is followed exactly, without a list of operations
(`shortcuts` speeds up the most frequent ones). Copies, cat and stack are followed as `Composite`. A
copy into a parameter is recorded. Any other operation makes the tensor opaque. Operations on the
parameters alone are watched, too.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .effects import Uses
from .events import Event, Fill, Write
from .geometry import Ints
from .shortcuts import METHODS, shortcut
from .targets import Targets, storage_key
from .values import (Base, Composite, Source, Unknown, Untraceable, View, copied, joined,
                     resolve, sources, write_piece)

_META = torch.device("meta")
_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.lift_fresh_copy.default}
_EMPTIES = {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}
_MARKS = {_aten._conj.default, _aten._neg_view.default}  # views with other values


class TensorMeta(NamedTuple):
    """An entry of a catalog: the whole tensor's shape and dtype."""
    shape: Ints
    dtype: torch.dtype


class NeedsData(Exception):
    """The loader asks for values of these tensors."""

    def __init__(self, names: Iterable[str]):
        self.names = frozenset(names)
        super().__init__(f"values of {', '.join(sorted(self.names)[:3])} are needed")


class Traced(torch.Tensor):
    """A stand-in for a tensor of the checkpoint, or for something made of them. Only a Recorder
    makes it.
    """

    _recorder: Recorder
    _inner: torch.Tensor
    _value: Base

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *args: Any, **kwargs: Any) -> Traced:
        raise TypeError("only a Recorder makes stand-ins")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's has self
            cls, func: Any, types: Any, args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None) -> Any:
        values = traced(args, kwargs or {})
        return values[0]._recorder.dispatch(func, args, kwargs or {}, values)

    def view_of(self) -> View:
        """Returns the elements of its base that it stands for."""
        return _view_of(self._value, self._inner)

    def _needs_data(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._recorder.needs_data([self])

    item = tolist = numpy = data_ptr = storage = untyped_storage = __array__ = _needs_data
    __dlpack__ = __bool__ = __int__ = __float__ = __index__ = __contains__ = _needs_data

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Any) -> None:
        # torch does not dispatch this, so `_inner` would keep its old value.
        self._needs_data()

    def __len__(self) -> int:
        # C takes a class with __getitem__ for a sequence: torch.tensor([stand_in]) calls this.
        if self.dim() == 0:
            self._needs_data()
        return self.size(0)

    def _made_views(self, result: Any) -> Any:
        """Returns the stand-ins for a method's `result` on `_inner`; None: it is not made of views.
        """
        inner = self._inner
        if result is inner:
            return self
        if type(result) is tuple:
            views = tuple(map(self._made_views, result))
            return None if any(view is None for view in views) else views
        if type(result) is not torch.Tensor or storage_key(result) != storage_key(inner):
            return None
        return _stand_in(self._recorder, result, self._value, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Traced({', '.join(sorted(set(sources(self._value)))[:3])}, {tuple(self.shape)})"


for _name in METHODS:
    setattr(Traced, _name, shortcut(_name, Traced._made_views))


def _stand_in(recorder: Recorder, inner: torch.Tensor, base: Base, device: torch.device) -> Traced:
    made: Traced = torch.Tensor._make_wrapper_subclass(
        Traced, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
        dtype=inner.dtype, device=device)
    made._recorder, made._inner, made._value = recorder, inner, base
    return made


def traced(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Traced]:
    """Returns the stand-ins among an operation's arguments."""
    found: list[Traced] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is Traced:
            found.append(value)
        elif type(value) in (list, tuple):
            found += [v for v in value if type(v) is Traced]
    return found


class Recorder(TorchDispatchMode):
    """Hands out stand-ins for the catalog's tensors, and records what becomes of them. As a
    context, also watches the targets.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], device: torch.device, *,
                 dry: bool = False):
        """`dry`: the loader's writes to targets are noted, but not done."""
        super().__init__()
        self._dry = dry
        self.targets = Targets(targets)
        self.device = device
        self.opaque: set[str] = set()
        # The tensors whose values the loader has asked for.
        self.asked: set[str] = set()
        self.events: list[Event] = []
        self.last: str | None = None
        self.uses = Uses(self.targets, Traced)
        self.ended = False
        self._tainted: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}
        self._lock = threading.RLock()  # transformers reads tensors in threads

    def tensor(self, name: str, meta: TensorMeta) -> Traced:
        """Returns the stand-in for one tensor of the catalog."""
        with torch._C._DisableTorchDispatch():
            # The loader's next() calls this code, which must not be traced.
            inner = torch.empty(meta.shape, dtype=meta.dtype, device=_META)
        return _stand_in(self, inner, Source(name, tuple(meta.shape), meta.dtype), self.device)

    def tensors(self, catalog: Mapping[str, TensorMeta]) -> Iterator[tuple[str, Traced]]:
        """Yields stand-ins for the catalog, as a loader takes tensors."""
        for name, meta in catalog.items():
            self.last = name
            yield name, self.tensor(name, meta)

    def end(self) -> None:
        """Ends the recording. Later uses of a stand-in raise RuntimeError."""
        self.ended = True

    def adopt(self, parameter: str, value: Traced) -> None:
        """Records that the loader has made `value` the parameter itself."""
        if value.numel():
            self._write(parameter, 0, value.view_of(), tuple(value.stride()), value.dtype)

    def needs_data(self, values: Iterable[Traced]) -> NoReturn:
        """Ends this run of the loader, which cannot continue without real values."""
        values = list(values)
        self._refuse_after_the_end(values)
        names = {name for value in values for name in sources(value._value)}
        self.opaque |= names
        self.asked |= names
        raise NeedsData(names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        values = traced(args, kwargs)
        if values:
            return self.dispatch(func, args, kwargs, values)
        self.uses.see(func, args, kwargs)
        if _is_mutable(func):
            self._plain_write(func, args, kwargs)
            to = kwargs.get("out", args[0] if args else None)
            if self._dry and self._is_target(to):
                return to if isinstance(to, torch.Tensor) else None
        return func(*args, **kwargs)

    def _is_target(self, to: Any) -> bool:
        """Whether this is memory of a target, or a list with such a tensor."""
        return any(isinstance(one, torch.Tensor) and self.targets.sharing(one) is not None
                   for one in (to if isinstance(to, (list, tuple)) else (to,)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would import its compiler, which takes seconds.
        return False

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                 values: list[Traced]) -> Any:
        """Runs and records an operation with at least one Traced."""
        self._refuse_after_the_end(values)
        with self._lock:
            if func is _aten.copy_.default:
                if not isinstance(args[1], Traced):
                    self.uses.see(func, args, kwargs)
                return self._copy(args[0], args[1])
            if _is_mutable(func):
                return self._mutate(func, args, kwargs, values)
            try:
                if not kwargs and args[0] is values[0] and all(map(_is_number, args[1:])):
                    # A shortcut for the most frequent case, with the same result.
                    result = func(values[0]._inner, *args[1:])
                else:
                    self.uses.see(func, args, kwargs)
                    result = _on_meta(func, args, kwargs)
            except (RuntimeError, NotImplementedError):
                self.needs_data(values)
            device = kwargs.get("device") or values[0].device
            if type(result) is torch.Tensor:
                return self._result(func, args, values, result, device)
            return _map(result, lambda out: self._result(func, args, values, out, device))

    def _refuse_after_the_end(self, values: Sequence[Traced]) -> None:
        if self.ended:
            raise RuntimeError(f"{values[0]!r} stood for a tensor while a loader was recorded, and "
                               "the loader has kept it: give this loader whole tensors")

    def _result(self, func: Any, args: Sequence[Any], values: list[Traced], out: torch.Tensor,
                device: torch.device) -> Traced:
        storage = storage_key(out)
        for value in values:
            if storage_key(value._inner) == storage:
                same = (out.dtype.itemsize == value._inner.dtype.itemsize
                        and func not in _MARKS)
                base = value._value if same else self._unknown(values)
                return _stand_in(self, out, base, value.device)
        try:
            base = self._made(func, args, values, out)
        except Untraceable:
            base = self._unknown(values)
        return _stand_in(self, out, base, torch.device(device))

    def _made(self, func: Any, args: Sequence[Any], values: list[Traced],
              out: torch.Tensor) -> Base:
        if func in _COPIES:
            return copied(values[0].view_of(), out.dtype, out.stride())
        if func in _EMPTIES and out.is_contiguous():
            return Composite(tuple(out.shape), out.dtype)
        if func in (_aten.cat.default, _aten.stack.default) and out.is_contiguous():
            dim = (args[1] if len(args) > 1 else 0) % out.dim()
            parts = [v.view_of() for v in values if v.numel()]
            if len(values) != len(args[0]) or any(p.dtype != out.dtype for p in parts):
                raise Untraceable
            if func is _aten.stack.default:
                parts = [_unsqueezed(part, dim) for part in parts]
            return joined(parts, dim, tuple(out.shape), out.dtype)
        raise Untraceable

    def _unknown(self, values: Iterable[Traced]) -> Unknown:
        names = frozenset(name for value in values for name in sources(value._value))
        self.opaque |= names
        return Unknown(names)

    def _copy(self, to: torch.Tensor, value: Any) -> torch.Tensor:
        if to.numel() == 0:
            return to
        if not isinstance(value, Traced):
            assert isinstance(to, Traced)
            self._spoil(to, [to])
        elif isinstance(to, Traced):
            try:
                if not isinstance(to._value, Composite):
                    raise Untraceable
                write_piece(to.view_of(), _expanded(value, to))
            except Untraceable:
                self._spoil(to, [to, value])
        else:
            self._copy_out(to, value)
        return to

    def _copy_out(self, to: torch.Tensor, value: Traced) -> None:
        """Records a copy into memory that is not ours: a parameter, or something unknown."""
        found = self.targets.find(to)
        if found is None:
            self._taint(to, self._unknown([value]).sources)
            return
        name, offset = found
        self._write(name, offset, _expanded(value, to), tuple(to.stride()), to.dtype)

    def _write(self, parameter: str, offset: int, view: View, stride: Ints,
               dtype: torch.dtype) -> None:
        size, flows = view.size, None
        try:
            flows = tuple(resolve(view, offset, stride, dtype))
            names = frozenset([flow.source.name for flow in flows])
        except Untraceable:
            names = frozenset(sources(view.base))
            self.opaque |= names
        self.events.append(Write(parameter, offset, size, stride, names, flows))

    def _spoil(self, to: Traced, values: list[Traced]) -> None:
        self._unknown(values)
        if isinstance(to._value, Composite):
            to._value.unknown = True

    def _mutate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                values: list[Traced]) -> Any:
        # The written argument is left out: it becomes opaque.
        self.uses.see(func, (None, *args[1:]), kwargs)
        names = self._unknown(values).sources
        written = [v for v in (*args[:1], kwargs.get("out")) if isinstance(v, torch.Tensor)]
        for tensor in written:
            if isinstance(tensor, Traced):
                self._spoil(tensor, [tensor])
            else:
                self._taint(tensor, names)
        if len(written) != 1:
            self.needs_data(values)
        return written[0]

    def _taint(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        """Notes that unknown values went into the loader's own memory, or into a target."""
        if tensor.numel() and self.targets.shares(tensor):
            name, offset = self.targets.find(tensor) or ("", 0)
            self.events.append(Write(name, offset, tuple(tensor.size()), tuple(tensor.stride()),
                                     names, None))
            return
        key = storage_key(tensor)
        before = self._tainted.get(key, (tensor, frozenset()))[1]
        self._tainted[key] = (tensor, before | names)

    def _plain_write(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Records a write of an operation without a Traced."""
        to = args[0] if args else kwargs.get("out")
        if isinstance(to, (list, tuple)):  # torch._foreach_…
            for one in to:
                self._plain_write(func, (one,), {})
            return
        if not isinstance(to, torch.Tensor) or not to.numel() or not self.targets.shares(to):
            return
        name, offset = self.targets.find(to) or ("", 0)
        value = args[1] if len(args) > 1 else None
        tainted = None
        if isinstance(value, torch.Tensor):
            tainted = self._tainted.get(storage_key(value))
        place = (name, offset, tuple(to.size()), tuple(to.stride()))
        if tainted is not None:
            self.events.append(Write(*place, tainted[1], None))
            return
        constant: float | int | bool | None = None
        if func in _FILLS:
            constant = 0 if func is _aten.zero_.default else value
        self.events.append(Fill(*place, constant))


def _is_number(argument: Any) -> bool:
    """Whether this is an integer, or a list of integers."""
    return type(argument) is int or (type(argument) is list
                                     and all([type(one) is int for one in argument]))


@functools.lru_cache(maxsize=None)
def _is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def swap(value: Any) -> Any:
        if isinstance(value, Traced):
            return value._inner
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, (list, tuple)):
            return type(value)(swap(v) for v in value)
        return value
    kept = {k: swap(v) for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    return func(*[swap(a) for a in args], **kept)


def _map(result: Any, function: Callable[[torch.Tensor], Traced]) -> Any:
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_map(r, function) for r in result)
    return result


def _unsqueezed(view: View, dim: int) -> View:
    return View(view.base, view.dtype, view.offset, (*view.size[:dim], 1, *view.size[dim:]),
                (*view.stride[:dim], 0, *view.stride[dim:]))


def _expanded(value: Traced, to: torch.Tensor) -> View:
    wide = value._inner
    if wide.size() != to.size():
        wide = wide.expand(to.size())
    return _view_of(value._value, wide)


def _view_of(base: Base, inner: torch.Tensor) -> View:
    return View(base, inner.dtype, int(inner.storage_offset()), tuple(inner.size()),
                inner.stride())
