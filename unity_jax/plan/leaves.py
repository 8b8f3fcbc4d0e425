"""The leaves of arguments on few rows: equal siblings share one, and a subtree that reads as an earlier one refers to
it.

`[0].params['layers'][0..23]['{query,value}']['kernel']` is 48 leaves.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LeafCells = tuple[str, tuple[str, ...], int]
"""The path of a leaf, what its row says of it, and the bytes that one device holds."""


@dataclass(eq=False)
class _Node:
    """A subtree of arguments: children by the next part of the path; or a leaf, with its cells."""

    children: dict[str, _Node] = field(default_factory=dict)
    path: str = ""
    cells: tuple[str, ...] | None = None
    bytes: int = 0

    @functools.cached_property
    def signature(self) -> Any:
        """Equal for subtrees with equal cells at equal relative paths."""
        return (self.cells, *((part, child.signature) for part, child in self.children.items()))

    @functools.cached_property
    def leaves(self) -> tuple[_Node, ...]:
        if self.cells is not None:
            return (self,)
        return tuple(leaf for child in self.children.values() for leaf in child.leaves)


@dataclass(frozen=True)
class Row:
    """A subtree whose leaves are on the rows below it, or leaves that read alike (`cells`)."""

    name: str
    count: int
    cells: tuple[str, ...]
    bytes: int


_PART = re.compile(r"""\[(?:'[^']*'|"[^"]*"|[^\]]*)\]|\.?[^.\[]+""")


def _tree(leaves: Iterable[LeafCells]) -> _Node:
    root = _Node()
    for path, cells, nbytes in leaves:
        node = root
        for part in _PART.findall(path):
            node = node.children.setdefault(part, _Node())
        node.path, node.cells, node.bytes = path, cells, nbytes
    return root


def rows_of(leaves: Iterable[LeafCells], columns: int, replicated: Iterable[str] = ()) -> list[Row]:
    """Rows in the order of the arguments, indented below their subtree.

    Equal siblings share a row, and a subtree that reads as an earlier one refers to it.

    **Arguments:** `columns`: how many cells a row has; `replicated`: paths of leaves to sum up with any siblings of
    which that is all there is to say.
    """
    root, known = _tree(leaves), set(replicated)
    rows: list[Row] = []
    seen: dict[Any, str] = {}

    def groups(node: _Node) -> list[list[str]]:
        plain = [part for part, child in node.children.items() if all(leaf.path in known for leaf in child.leaves)]
        if node is root or sum(len(node.children[part].leaves) for part in plain) < 2:
            return _equal(node)
        found = [plain, *(g for g in _equal(node) if g[0] not in plain)]
        return sorted(found, key=lambda g: list(node.children).index(g[0]))

    def visit(node: _Node, path: str, indent: str, times: int) -> None:
        for parts in groups(node):
            children = [node.children[part] for part in parts]
            leaves = [leaf for child in children for leaf in child.leaves]
            count, nbytes = times * len(leaves), times * sum(leaf.bytes for leaf in leaves)
            name, child, many = _join(parts), children[0], times * len(parts)
            passed = [(name, child)]
            alike = all(c.signature == child.signature for c in children)
            while alike and child.children and len(inner := _equal(child)) == 1:
                name, child, many = name + _join(inner[0]), child.children[inner[0][0]], many * len(inner[0])
                passed.append((name, child))
            earlier = next((seen[c.signature] for _, c in passed if c.signature in seen), None)
            cells = {leaf.cells for leaf in leaves}
            summed = all(leaf.path in known for leaf in leaves)
            if len(cells) == 1 and (summed or not child.children):
                rows.append(Row(indent + name, count, cells.pop() or (), nbytes))
            elif summed:
                rows.append(Row(indent + name, count, ("replicated",), nbytes))
            elif earlier:
                rows.append(Row(indent + name, count, (f"as {earlier}",) + ("",) * (columns - 1), nbytes))
            else:
                seen.update((c.signature, path + n) for n, c in passed)
                rows.append(Row(indent + name, count, ("",) * columns, nbytes))
                visit(child, path + name, indent + "  ", many)

    visit(root, "", "", 1)
    return rows


def _equal(node: _Node) -> list[list[str]]:
    """The children of a node, those with equal subtrees together; positions only where they follow each other."""
    groups: dict[Any, list[str]] = {}
    for part, child in node.children.items():
        groups.setdefault((_kind(part), child.signature), []).append(part)
    return list(groups.values())


def _kind(part: str) -> str:
    return "position" if re.fullmatch(r"\[\d+\]", part) else "key" if part.startswith("[") else "field"


def _join(parts: Sequence[str]) -> str:
    """`[0]`, `[1]`, `[2]` -> `[0..2]`; `['a']`, `['b']` -> `['{a,b}']`; `.a`, `.b` -> `.{a,b}`."""
    if len(parts) == 1:
        return parts[0]
    kinds = {_kind(part) for part in parts}
    if kinds == {"position"}:
        return f"[{ranges([int(part[1:-1]) for part in parts])}]"
    if kinds == {"key"}:
        return "['{" + _listing([part[2:-2] for part in parts]) + "}']"
    if kinds == {"field"}:
        return ".{" + _listing([part.removeprefix(".") for part in parts]) + "}"
    return "{" + _listing(parts) + "}"


def ranges(numbers: Sequence[int]) -> str:
    """`0..2,5`"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return _listing([f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])


def _listing(names: Sequence[str], width: int = 32) -> str:
    """The names with commas, as many as fit."""
    ends = itertools.accumulate(len(name) + 1 for name in names)
    shown = max(1, sum(end <= width for end in ends))
    rest = len(names) - shown
    return ",".join(names[:shown]) + (f",+{rest} more" if rest else "")
