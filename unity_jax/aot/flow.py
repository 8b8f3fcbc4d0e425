"""Where an array of a compiled program comes from and goes to, through instructions that only move it.

    flow = Flow(module)
    [v.op.opcode for v in flow.origin(Value((), module.entry, psum))]
    # ['all-reduce']
    [v.op.opcode for v in flow.origin(flow.operand(Value((), module.entry, psum), 0))]
    # ['copy', 'fusion', 'convert', 'parameter', 'dot']

Walks enter and leave fusions and asynchronous computations, read through tuples, and step over copies, reshapes, slices
and casts: what happens to an array on the way is the evidence of what a compiler did to a collective.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from unity_jax.aot.hlo import Array, Instruction, Module
from unity_jax.aot.sites import Path

MOVES = {
    *("bitcast", "reshape", "copy", "copy-start", "copy-done", "transpose", "convert", "optimization-barrier"),
    *("slice", "slice-start", "slice-done", "dynamic-slice", "pad"),
}
"""Instructions whose first operand is the array that they pass on, whole or in part."""


def _moves(op: Instruction) -> bool:
    """Whether it passes its first operand on. XLA:TPU copies a large array in slices, which it then takes as one."""
    return op.opcode in MOVES or 'custom_call_target="ConcatBitcast"' in op.attributes


def _takes(op: Instruction, index: int) -> bool:
    """Whether it takes this element out of a tuple."""
    return f"index={index}" in op.attributes.replace(" ", "").split(",")


@dataclass(frozen=True)
class Value:
    """One array of an instruction's result, of those reached through `path`; `index` counts in a tuple."""

    path: Path
    computation: str
    op: Instruction
    index: int = 0

    @property
    def array(self) -> Array | None:
        """Its type; None for an instruction that makes nothing, or a nest of tuples."""
        arrays = self.op.arrays
        return arrays[self.index] if self.index < len(arrays) else None


class Flow:
    """Walks over the values of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._users: dict[str, dict[str, list[Instruction]]] = {}

    def operand(self, value: Value, position: int) -> Value:
        """An operand of the instruction that makes a value."""
        op = self.module.computations[value.computation][value.op.operands[position]]
        return Value(value.path, value.computation, op)

    def origin(self, value: Value) -> list[Value]:
        """The value and all it was on its way, back to the instruction that computed it."""
        found = [value]
        while (before := self._before(found[-1])) is not None:
            found.append(before)
        return found

    def uses(self, value: Value, until: str = "") -> Iterator[Value]:
        """The values made from it: on each path onward every move, up to one with opcode `until`, and then the first
        instruction that is no move; or the last value itself, where it leaves the program or a loop's body."""
        if value.op.root:
            if not value.path or value.path[-1][1].opcode == "while":
                yield value
            else:
                computation, caller = value.path[-1]
                yield from self.uses(Value(value.path[:-1], computation, caller, value.index), until)
        for user in self._users_of(value):
            for position in [i for i, name in enumerate(user.operands) if name == value.op.name]:
                yield from self._through(value, user, position, until)

    def _before(self, value: Value) -> Value | None:
        op, path = value.op, value.path
        if op.opcode == "parameter" and path:
            computation, caller = path[-1]
            if caller.opcode == "while":
                return None
            return self.operand(Value(path[:-1], computation, caller), int(op.arguments.strip("()")))
        if op.opcode in ("fusion", "async-start", "call"):
            return self._element(self._root(value), value.index)
        if op.opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", op.attributes)
            assert index is not None, op
            return self._element(self.operand(value, 0), int(index[1]))
        if _moves(op):
            return self.operand(value, 0)
        return None

    def _root(self, value: Value) -> Value:
        inside = value.op.called[0]
        root = next(i for i in self.module.computations[inside].values() if i.root)
        return Value((*value.path, (value.computation, value.op)), inside, root)

    def _element(self, value: Value, index: int) -> Value | None:
        """Element `index` of a tuple."""
        if value.op.opcode == "tuple":
            return self.operand(value, index)
        if value.op.opcode == "optimization-barrier":
            return self._element(self.operand(value, 0), index)
        if value.op.opcode == "parameter" and value.path and value.path[-1][1].opcode == "while":
            return self._invariant(value, index)
        return dataclasses.replace(value, index=index)

    def _invariant(self, parameter: Value, index: int) -> Value | None:
        """What a loop was given, for an element of its state that the body passes on unchanged."""
        computation, loop = parameter.path[-1]
        root = next(i for i in self.module.computations[parameter.computation].values() if i.root)
        if root.opcode != "tuple":
            return None
        same = self.module.computations[parameter.computation][root.operands[index]]
        if same.opcode != "get-tuple-element" or not _takes(same, index):
            return None
        outside = Value(parameter.path[:-1], computation, loop)
        return self._element(self.operand(outside, 0), index)

    def _users_of(self, value: Value) -> list[Instruction]:
        users = self._users.get(value.computation)
        if users is None:
            users = self._users[value.computation] = {}
            for op in self.module.computations[value.computation].values():
                for name in dict.fromkeys(op.operands):
                    users.setdefault(name, []).append(op)
        return users.get(value.op.name, [])

    def _through(self, value: Value, user: Instruction, position: int, until: str) -> Iterator[Value]:
        made = Value(value.path, value.computation, user)
        if user.opcode == "get-tuple-element":
            if _takes(user, value.index):
                yield from self.uses(made, until)
        elif user.opcode == "fusion":
            path = (*value.path, (value.computation, user))
            for op in self.module.computations[user.called[0]].values():
                if op.opcode == "parameter" and op.arguments == f"({position})":
                    yield from self.uses(Value(path, user.called[0], op), until)
        elif user.opcode == "tuple":
            yield from self.uses(Value(value.path, value.computation, user, position), until)
        elif user.opcode == "optimization-barrier" or user.opcode.endswith("-done"):
            yield from self.uses(Value(value.path, value.computation, user, value.index), until)
        else:
            yield made
            if _moves(user) and position == 0 and user.opcode != until:
                yield from self.uses(made, until)
