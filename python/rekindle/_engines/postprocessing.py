"""What an engine's load and post-processing change of a model besides its tensors.

Attributes of modules, and of the engine's own objects that they refer to (quantization methods,
kernels, attention backends), are noted before and after. A successor that takes over the tensors
gets changes that are plain values. Any other change is a reason not to take over.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..errors import InvalidError

# From a module: its name in the model, then attributes ("a", name) and items ("i", key).
Path = tuple[Any, ...]
Noted = dict[Path, Any]
Change = dict[str, Any]

# Every module has these. Tensors and submodules are compared elsewhere.
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_NO_OBJECTS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Tensor,
               torch.nn.Module)
_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()
_MOST_ITEMS = 4096


class NotResident(Exception):
    """Why a model cannot be given to a successor."""


def noted(model: torch.nn.Module) -> Noted:
    """Notes what a model's Python objects refer to. Keeps the objects alive, but no tensor."""
    packages = {kind.__module__.partition(".")[0] for module in model.modules()
                for kind in type(module).__mro__} - {"torch", "builtins", "abc", "typing"}
    found: Noted = {}
    seen: set[int] = set()

    def visit(at: Path, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[at] = weakref.ref(value), value._version
        elif _encoded(value) is not None or isinstance(value, _NO_OBJECTS):
            found[at] = value
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
            found[at] = type(value)
            if id(value) not in seen:
                seen.add(id(value))
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    visit((*at, ("i", key)), item)
        else:
            found[at] = value
            if id(value) not in seen and _is_of(value, packages):
                seen.add(id(value))
                for name, item in list(vars(value).items()):
                    visit((*at, ("a", name)), item)

    for path, module in model.named_modules():
        found[path, ("m", "")] = module
        for name, value in list(vars(module).items()):
            if name not in _OF_MODULES and not isinstance(value, torch.Tensor):
                visit((path, ("a", name)), value)
    return found


def changes(before: Noted, after: Noted) -> tuple[list[Change], str | None]:
    """Returns the changes that a successor can make itself: attributes with plain values, and
    attributes that are gone. And the first change that it cannot make, as text, if there is one."""
    found: list[Change] = []
    other: list[str] = []
    parents: set[Path] = set()
    # A path comes after those of the objects that have it.
    for at in dict.fromkeys((*after, *before)):
        value, old = after.get(at, _MISSING), before.get(at, _MISSING)
        if any(at[:size] in parents for size in range(2, len(at))):
            continue
        if value is not _MISSING and old is not _MISSING and _same(old, value):
            continue
        parents.add(at)
        encoded = _encoded(value)
        if at[-1][0] == "a" and value is _MISSING:
            found.append({"at": _plain_path(at)})
        elif at[-1][0] == "a" and encoded is not None:
            found.append({"at": _plain_path(at), "value": encoded})
        else:
            other.append(f"{shown(at)} {'is gone' if value is _MISSING else _kind(value)}")
    return found, other[0] if other else None


def now(model: torch.nn.Module, known: list[Change]) -> list[Change]:
    """Returns earlier changes with the values that they have now."""
    found = []
    for change in known:
        if "value" in change:
            encoded = _encoded(vars(_holder(model, change["at"])).get(change["at"][-1][1]))
            if encoded is None:
                raise NotResident(f"{shown(change['at'])} is no plain value any more")
            change = {**change, "value": encoded}
        found.append(change)
    return found


def make(model: torch.nn.Module, known: list[Change]) -> None:
    """Makes the changes in a successor. InvalidError: its objects are others."""
    for change in known:
        holder, name = _holder(model, change["at"]), change["at"][-1][1]
        try:
            if "value" in change:
                setattr(holder, name, _decoded(change["value"]))
            elif name in vars(holder):
                delattr(holder, name)
        except AttributeError as why:
            raise InvalidError(f"{shown(change['at'])} cannot be changed: {why}") from None


def shown(at: Any) -> str:
    steps = "".join({"a": f".{key}", "i": f"[{key!r}]", "m": ""}[kind] for kind, key in at[1:])
    return f"{at[0]}{steps}".lstrip(".")


def attributes(before: dict[str, Any], after: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns how a successor gets the attributes of a tensor: `same` as it has itself, or `set` to
    plain values. NotResident names an attribute for which that is impossible."""
    same, changed = [], {}
    for name, value in after.items():
        if name in before and _same(before[name], value):
            same.append(name)
        elif (encoded := _encoded(value)) is not None:
            changed[name] = encoded
        else:
            raise NotResident(f"{where}.{name} {_kind(value)}")
    return {"same": same, "set": changed}


def decoded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _decoded(value) for name, value in values.items()}


# --- values

def _is_of(value: Any, packages: set[str]) -> bool:
    """Whether it is an object of the engine that a layer may own. Configurations are shared and
    known from the start: the key has them."""
    kind = type(value)
    return (hasattr(value, "__dict__") and kind.__module__.partition(".")[0] in packages
            and not kind.__name__.endswith("Config"))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], weakref.ref):
        # Tensors of objects that are not modules.
        return (isinstance(other, tuple) and len(other) == 2 and isinstance(other[0], weakref.ref)
                and one[0]() is not None and one[0]() is other[0]() and one[1] == other[1])
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    encoded = _encoded(one)
    return encoded is not None and encoded == _encoded(other)


def _encoded(value: Any) -> Any:
    """Returns JSON for a plain value; None: it is not plain. Equal values have equal JSON."""
    if isinstance(value, float) and math.isnan(value):
        return {"float": "nan"}
    if type(value) in _PLAIN:
        return {type(value).__name__: value}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if type(value) in (list, tuple, torch.Size) and len(value) <= _MOST_ITEMS:
        items = [_encoded(item) for item in value]
        return None if None in items else {type(value).__name__: items}
    return None


def _decoded(encoded: dict[str, Any]) -> Any:
    (kind, value), = encoded.items()
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "device":
        return torch.device(value)
    if kind in ("list", "tuple", "Size"):
        items = [_decoded(item) for item in value]
        return items if kind == "list" else tuple(items) if kind == "tuple" else torch.Size(items)
    return math.nan if value == "nan" and kind == "float" else value


def _kind(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], weakref.ref):
        return "has become another tensor, or has other values"
    kind = value if isinstance(value, type) else type(value)
    return f"has become a {kind.__module__}.{kind.__qualname__}, which is no plain value"


def _plain_path(at: Path) -> list[Any]:
    return [at[0], *([kind, key] for kind, key in at[1:])]


def _steps(at: list[Any]) -> Iterator[tuple[str, Any]]:
    yield from at[1:-1]


def _holder(model: torch.nn.Module, at: list[Any]) -> Any:
    try:
        value: Any = model.get_submodule(at[0])
        for kind, key in _steps(at):
            value = vars(value)[key] if kind == "a" else value[key]
    except (AttributeError, KeyError, IndexError, TypeError) as why:
        raise InvalidError(f"{shown(at)} is not in this model: {why}") from None
    return value
