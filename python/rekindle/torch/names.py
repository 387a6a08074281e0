"""From the trainer's names to those of the checkpoint, also where the two cut tensors differently.

Rules work on parts, not on tensors: a rule moves the box of a part by arithmetic, and the part
reads the same elements as before. A list of rules is applied in order, each to the names that the
rule before it has made. "Rows" below are the indices along the dimension of the rule.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union

from .._parts import Part, nothing_of
from ..errors import InvalidError
from .joining import Item, joined


class Rename(NamedTuple):
    """Replaces each match of the regex in a name, as `re.sub`. `to` None: the tensor is not
    published. A pair (pattern, to) in a list of rules is the same.

    `optional`, here and in the other rules: on some ranks no tensor matches, for example because
    they have other layers. Otherwise a rule without a match raises InvalidError."""

    pattern: str
    to: str | None
    optional: bool = False


class Split(NamedTuple):
    """Splits tensors whose whole name matches the regex. `pieces`: target names, which may refer
    to groups of the regex (`\\1`), and the rows of each whole target. The rows of the piece None
    are not published: for example the padding of a vocabulary.

    `groups`: the source repeats the pieces so many times, each time with 1/groups of the rows.
    Megatron's linear_qkv has one group for each K/V head; a gate and up projection that tensor
    parallelism has cut has one group for each rank."""

    pattern: str
    pieces: Mapping[str | None, int] | Mapping[str, int]
    dim: int = 0
    groups: int = 1
    optional: bool = False


class Fuse(NamedTuple):
    """Joins tensors into one, in order. `sources`: a regex for the whole name of the first; the
    other names, and `target`, may refer to its groups. `groups`: as of `Split`."""

    sources: Sequence[str]
    target: str
    dim: int = 0
    groups: int = 1
    optional: bool = False


class Block(NamedTuple):
    """Rows [start, stop) of the source are the rows of the target from `at`. Without a target,
    they are not published."""

    start: int
    stop: int
    target: str | None
    at: int = 0


class Rows(NamedTuple):
    """Moves blocks of rows of tensors whose whole name matches the regex: for permutations that
    `Split` cannot describe. The blocks must cover the source, and each target, exactly once."""

    pattern: str
    blocks: Sequence[Block]
    dim: int = 0
    optional: bool = False


class Unstack(NamedTuple):
    """Makes one tensor of each index of the first dimension, which goes. `to` has {index}: for
    example experts that the trainer keeps in one tensor."""

    pattern: str
    to: str
    optional: bool = False


# Returns the other name. None: the tensor is not published.
Function = Callable[[str], "str | None"]
Rule = Union[Rename, Split, Fuse, Rows, Unstack, "tuple[str, str | None]", Function]
Names = Union[Function, Sequence[Rule]]


def renamed(parts: Iterable[Part], names: Names | None) -> list[Part]:
    """Returns the parts under the checkpoint's names, without empty ones.

    `names`: a list of rules, or a function of a name that returns the other name (None: do not
    publish), which may also be a rule of a list. InvalidError, naming the tensor or rule: a rule
    that matches nothing, sizes that do not add up, or two tensors that give the same elements."""
    items = [Item(part.name, part) for part in parts]
    for rule in (names,) if callable(names) else names or ():
        items = _apply(rule, items)
    return joined(items)


def _apply(rule: Rule, items: list[Item]) -> list[Item]:
    if isinstance(rule, Rename):
        return _rename(rule, items)
    if isinstance(rule, Fuse):
        return _fuse(rule, items)
    if isinstance(rule, Split):
        return _cut(rule, items, lambda item, match: _split_blocks(rule, item.part, match))
    if isinstance(rule, Rows):
        return _cut(rule, items, lambda item, match: [
            block._replace(target=_expanded(match, block.target)) for block in rule.blocks])
    if isinstance(rule, Unstack):
        return _unstack(rule, items)
    if isinstance(rule, tuple) and len(rule) == 2:
        return _rename(Rename(*rule), items)
    if callable(rule):
        named = [(item, rule(item.part.name)) for item in items]
        return [_under(item, name) for item, name in named if name is not None]
    raise InvalidError(f"{rule!r} is no rule for names: give a pair (regex, replacement), Rename, "
                       "Split, Fuse, Rows or Unstack")


def _under(item: Item, name: str) -> Item:
    return Item(item.source, item.part._replace(name=name))


def _check_matched(rule: Any, matched: object) -> None:
    if not matched and not rule.optional:
        raise InvalidError(f"{rule} matches no tensor: correct it, or give optional=True if only "
                           "some ranks have such a tensor")


def _matches(rule: Any, pattern: str, items: list[Item]) -> dict[str, re.Match[str]]:
    """Returns the matching names."""
    compiled = re.compile(pattern)
    found = {name: match for name in dict.fromkeys(item.part.name for item in items)
             if (match := compiled.fullmatch(name)) is not None}
    _check_matched(rule, found)
    return found


def _rename(rule: Rename, items: list[Item]) -> list[Item]:
    pattern, matched, kept = re.compile(rule.pattern), 0, []
    for item in items:
        name, count = pattern.subn(rule.to or "", item.part.name)
        matched += count
        if not count:
            kept.append(item)
        elif rule.to is not None:
            kept.append(_under(item, name))
    _check_matched(rule, matched)
    return kept


def _cut(rule: Split | Rows, items: list[Item],
         blocks_of: Callable[[Item, "re.Match[str]"], list[Block]]) -> list[Item]:
    matches = _matches(rule, rule.pattern, items)
    found: list[Item] = []
    for item in items:
        match = matches.get(item.part.name)
        if match is None:
            found.append(item)
            continue
        dim, blocks = _dimension(item.part, rule.dim), blocks_of(item, match)
        found += _moved(item, dim, blocks, _sizes(item.part, dim, blocks))
    return found


def _expanded(match: re.Match[str], name: str | None) -> str | None:
    return None if name is None else match.expand(name)


def _dimension(part: Part, dim: int) -> int:
    if not -len(part.shape) <= dim < len(part.shape):
        raise InvalidError(f"'{part.name}', of shape {list(part.shape)}, has no dimension {dim}")
    return dim % len(part.shape)


def _split_blocks(rule: Split, part: Part, match: re.Match[str]) -> list[Block]:
    pieces = {_expanded(match, name): size for name, size in rule.pieces.items()}
    size = part.shape[_dimension(part, rule.dim)]
    if sum(pieces.values()) != size:
        raise InvalidError(f"'{part.name}' has {size} rows in dimension {rule.dim}, its pieces "
                           f"{' + '.join(map(str, pieces.values()))} = {sum(pieces.values())}")
    _check_groups(part.name, pieces, rule.groups)
    blocks, start = [], 0
    for group in range(rule.groups):
        for name, rows in pieces.items():
            count = rows // rule.groups
            blocks.append(Block(start, start + count, name, group * count))
            start += count
    return blocks


def _check_groups(name: str, pieces: Mapping[Any, int], groups: int) -> None:
    for piece, rows in pieces.items():
        if groups < 1 or rows % groups:
            raise InvalidError(f"'{name}' has {groups} groups, which {rows} rows of '{piece}' do "
                               "not divide into")


def _sizes(part: Part, dim: int, blocks: Sequence[Block]) -> dict[str, int]:
    """Returns the rows of each target. InvalidError: blocks overlap or leave a gap."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for block in blocks:
        if block.target is not None:
            ranges.setdefault(block.target, []).append(
                (block.at, block.at + block.stop - block.start))
    source = [(block.start, block.stop) for block in blocks]
    _check_cover(part.name, source, part.shape[dim], part.name)
    for target, taken in ranges.items():
        _check_cover(part.name, taken, max(stop for _, stop in taken), target)
    return {target: max(stop for _, stop in taken) for target, taken in ranges.items()}


def _check_cover(name: str, ranges: list[tuple[int, int]], size: int, of: str) -> None:
    at = 0
    for start, stop in sorted(ranges):
        if start != at or stop < start:
            break
        at = stop
    else:
        if at == size:
            return
    raise InvalidError(f"the blocks for '{name}' do not cover the {size} rows of '{of}' exactly "
                       f"once: see row {at}")


def _moved(item: Item, dim: int, blocks: Iterable[Block], sizes: Mapping[str, int]) -> list[Item]:
    """Returns what the item's part has of each target; an empty part where it has nothing."""
    part, found, missing = item.part, [], dict(sizes)
    first = part.offset[dim]
    for block in blocks:
        start, stop = max(block.start, first), min(block.stop, first + part.extent[dim])
        if block.target is None or start >= stop or part.is_empty:
            continue
        missing.pop(block.target, None)
        count = stop - start
        found.append(Item(item.source, Part(
            block.target, part.dtype, _with(part.shape, dim, sizes[block.target]),
            _with(part.offset, dim, block.at + start - block.start),
            _with(part.extent, dim, count), _Narrow(part, dim, start - first, count))))
    return found + [Item(item.source, nothing_of(target, part.dtype, _with(part.shape, dim, size)))
                    for target, size in missing.items()]


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1:])


class _Narrow:
    def __init__(self, part: Part, dim: int, start: int, count: int) -> None:
        self._part, self._range = part, (dim, start, count)

    def __call__(self) -> Any:
        return self._part.read().narrow(*self._range)


def _fuse(rule: Fuse, items: list[Item]) -> list[Item]:
    if not rule.sources:
        raise InvalidError(f"{rule} has no source")
    whole = {item.part.name: item.part for item in reversed(items)}
    plans: dict[str, tuple[int, list[Block], int]] = {}
    targets: dict[str, str] = {}
    for name, match in _matches(rule, rule.sources[0], items).items():
        sources = [name, *map(match.expand, rule.sources[1:])]
        target = match.expand(rule.target)
        for source in sources[1:]:
            _check_fusable(target, whole[name], whole.get(source), source, rule.dim)
        dim = _dimension(whole[name], rule.dim)
        sizes = {source: whole[source].shape[dim] for source in sources}
        _check_groups(target, sizes, rule.groups)
        total, before = sum(sizes.values()), 0
        for source, size in sizes.items():
            count = size // rule.groups
            plans[source] = (dim, [Block(
                group * count, (group + 1) * count, target,
                group * (total // rule.groups) + before) for group in range(rule.groups)], total)
            targets[source] = target
            before += count
    found: list[Item] = []
    for item in items:
        if item.part.name in plans:
            dim, blocks, total = plans[item.part.name]
            found += _moved(item, dim, blocks, {targets[item.part.name]: total})
        else:
            found.append(item)
    return found


def _check_fusable(target: str, first: Part, other: Part | None, name: str, dim: int) -> None:
    if other is None or other is first:
        raise InvalidError(f"'{target}' needs '{name}' beside '{first.name}', and there is "
                           f"{'none' if other is None else 'only one'}")
    dim = _dimension(first, dim)
    if other.dtype != first.dtype or len(other.shape) != len(first.shape) or (
            _with(other.shape, dim, 0) != _with(first.shape, dim, 0)):
        raise InvalidError(
            f"'{target}' cannot join '{first.name}' ({first.dtype} {list(first.shape)}) and "
            f"'{name}' ({other.dtype} {list(other.shape)}) along dimension {dim}")


def _unstack(rule: Unstack, items: list[Item]) -> list[Item]:
    matches = _matches(rule, rule.pattern, items)
    found: list[Item] = []
    for item in items:
        part, match = item.part, matches.get(item.part.name)
        if match is None:
            found.append(item)
            continue
        _dimension(part, 0)
        for index in range(part.shape[0]):
            name = match.expand(rule.to).replace("{index}", str(index))
            at = index - part.offset[0]
            if part.is_empty or not 0 <= at < part.extent[0]:
                made = nothing_of(name, part.dtype, part.shape[1:])
            else:
                made = Part(name, part.dtype, part.shape[1:], part.offset[1:], part.extent[1:],
                            _Select(part, at))
            found.append(Item(item.source, made))
    return found


class _Select:
    def __init__(self, part: Part, at: int) -> None:
        self._part, self._at = part, at

    def __call__(self) -> Any:
        return self._part.read()[self._at]
