"""The text of a compiled program (`jax.stages.Compiled.as_text()`) as data.

    module = parse(compiled.as_text())
    [op.opcode for op in module.computations[module.entry].values()]
    # ['parameter', 'fusion', 'all-reduce', 'tuple']
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = r"%?[\w.\-]+"
_COMPUTATION = re.compile(rf"(?P<entry>ENTRY )?(?P<name>{_NAME}) \(.*\) -> .*\{{$")
_INSTRUCTION = re.compile(rf"\s+(?P<root>ROOT )?(?P<name>{_NAME}) = (?P<rest>.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|true_computation|false_computation|branch_computations|called_computations)="
    rf"(\{{[^}}]*\}}|{_NAME})"
)


@dataclass(frozen=True)
class Array:
    """One array of a type: element type, shape, bytes, and the memory space it is in (0: device memory)."""

    element: str
    shape: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        return element_bytes(self.element, self.shape)


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(arguments), attributes`. `operands` are the names among the arguments; `scheduled`
    the length of its schedule, where that is known (`aot.bundles`)."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str
    root: bool
    scheduled: int | None = None

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%[\w.\-]+", self.arguments))

    @property
    def called(self) -> list[str]:
        """The computations it names: of a fusion, a loop, a branch, a reduction."""
        return [name for group in _CALLED.findall(self.attributes) for name in re.findall(_NAME, group)]

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its result; several for a tuple."""
        return arrays(self.type)

    @property
    def cycles(self) -> int | None:
        """XLA:TPU's estimate of the clock cycles it takes; where it gives none, the length of its schedule. The largest
        integer is none: seen of a fusion that draws dropout masks beside a reduction (T5)."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match and int(match[1]) < 2**62 else self.scheduled


@dataclass(frozen=True)
class Module:
    """Every computation by name, with its instructions by name in scheduled order; and the name of the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def trips(self, loop: Instruction) -> int | None:
        """How often a `while` runs, as the compiler says (XLA:GPU) or as its condition compares a counter from 0 with a
        constant (XLA:TPU); None if neither is so."""
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(match[1])
        condition = re.search(r"condition=(%?[\w.\-]+)", loop.attributes)
        body = self.computations.get(condition[1], {}) if condition else {}
        compare = next((op for op in body.values() if op.root and op.opcode == "compare"), None)
        if compare is None or "direction=LT" not in compare.attributes:
            return None
        limits = [body[name].arguments for name in compare.operands if body[name].opcode == "constant"]
        return int(limits[0].strip("()")) if limits else None


def parse(text: str) -> Module:
    """Read a module. Raises `ValueError` for other text."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            current[match["name"]] = _instruction(match["name"], match["rest"], bool(match["root"]))
        elif match := _COMPUTATION.match(line):
            current = computations.setdefault(match["name"], {})
            entry = match["name"] if match["entry"] else entry
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled HLO module")
    return Module(computations, entry)


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    opcode = rest[end:opening].strip()
    return Instruction(name, rest[:end], opcode, rest[opening : closing + 1], rest[closing + 1 :], root)


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in the HLO line: {text[:200]}")


def arrays(type_: str) -> list[Array]:
    """The arrays of a type: `(f32[8,4]{1,0:T(8,128)S(1)}, u32[])` has two, the first in memory space 1."""
    found = []
    for element, dims, layout in _ARRAY.findall(type_):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)
        found.append(Array(element, shape, int(space[1]) if space else 0))
    return found


def element_bytes(element: str, shape: Iterable[int]) -> int:
    """Bytes of an array of an MLIR or HLO element type (`f32`, `ui8`, `complex<f32>`, `c64`, `f8e4m3fn`, `pred`)."""
    match = re.search(r"\d+", element)
    bits = 8 if element in ("pred", "i1") else int(match[0]) if match else 0
    return math.ceil(math.prod(shape) * bits * (2 if element.startswith("complex") else 1) / 8)
