"""What a compiler may make of a planned collective: a table of named rewrites, each detected by its trace in the HLO.

    [(form.key, names) for form, names in candidates(flow, part)]
    # [(('all_reduce', ('x',), 16384), ()), (('all_reduce', ('x',), 32768), ('moved cast',))]

A part is one array of one compiled collective. Every detector looks at the instructions around a part and says which
other forms it may have had before the rewrite that the detector is named for. `aot.account` then finds the planned
collective of each part; a form that no detector derives from the program's text explains nothing. Whether the program
was lowered with the planned collectives to begin with is seen in its StableHLO (`aot.collectives`), not here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unity_jax.aot.collectives import Key
from unity_jax.aot.flow import Flow, Value
from unity_jax.aot.hlo import element_bytes
from unity_jax.aot.sites import Site
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class Form:
    """A collective of one array: the larger of its operand and its result has `elements` of type `element`."""

    kind: str
    axes: tuple[str, ...]
    elements: int
    element: str
    trips: int

    @property
    def key(self) -> Key:
        """Kind, axes and bytes."""
        return self.kind, self.axes, element_bytes(self.element, (self.elements,))


@dataclass(frozen=True)
class Part:
    """One array of a compiled collective: `operand` and `result` of `site`, or a piece of them that was put into one
    array with others (`result` is None then). `given`: the rewrites that made a part of the collective."""

    site: Site
    form: Form
    group: int
    operand: Value
    result: Value | None
    given: tuple[str, ...] = ()


Detector = Callable[[Flow, Part, Form], Iterable[Form]]
COMBINED, PIPELINED, SUMMED = "combined", "pipelined loop", "sum gathered once"


def parts(flow: Flow, site: Site, mesh: MeshAxes) -> list[Part]:
    """The arrays of a collective; those of an all-reduce over a concatenation are the arrays put together."""
    made = Value(site.path, site.computation, site.op)
    group = math.prod(mesh[a] for a in site.axes if a in mesh.names)
    found = []
    for i, (operand, result) in enumerate(zip(site.operands, site.results, strict=True)):
        larger = max(operand, result, key=lambda array: array.bytes)
        form = Form(site.kind, site.axes, math.prod(larger.shape), larger.element, site.trips)
        result_of = dataclasses.replace(made, index=i)
        found.append(Part(site, form, group, flow.operand(made, i), result_of, (COMBINED,) * (len(site.operands) > 1)))
    if len(found) > 1 or site.kind != "all_reduce":
        return found
    last = flow.origin(found[0].operand)[-1]
    if last.op.opcode != "concatenate":
        return found
    pieces = [flow.operand(last, i) for i in range(len(last.op.operands))]
    return [
        Part(site, dataclasses.replace(found[0].form, elements=_elements(p)), group, p, None, (COMBINED,))
        for p in pieces
    ]


def rejoined(flow: Flow, found: list[Part]) -> list[Part]:
    """Parts of which those of a pipelined loop are one again: the compiler took the first or the last round of a loop
    out of it, so a collective stands in the loop and once more outside."""
    made: dict[int, Part | None] = dict(enumerate(found))
    for i, outside in enumerate(found):
        for j, inside in enumerate(found):
            if made[j] is inside and _same_but_for_trips(inside, outside) and _taken_out(flow, outside, inside):
                form = dataclasses.replace(inside.form, trips=inside.form.trips + outside.form.trips)
                given = dict.fromkeys((*inside.given, *outside.given, PIPELINED))
                made[i], made[j] = None, dataclasses.replace(inside, form=form, given=tuple(given))
                break
    return [part for part in made.values() if part is not None]


def _same_but_for_trips(a: Part, b: Part) -> bool:
    return a.form == dataclasses.replace(b.form, trips=a.form.trips) and _sides(a) == _sides(b)


def _sides(part: Part) -> list[int]:
    """The sides of its operand, in no order: a round that was taken out of a loop may be stored otherwise."""
    array = part.operand.array
    return sorted(n for n in array.shape if n > 1) if array is not None else []


def _taken_out(flow: Flow, outside: Part, inside: Part) -> bool:
    """Whether one part is a round of the loop around the other: it stands one loop further out, and its value enters or
    leaves the loop, or it is named as in a loop while the loop has left out a round at the start."""
    loops = [caller for _, caller in inside.site.path if caller.opcode == "while"]
    around = [caller for _, caller in outside.site.path if caller.opcode == "while"]
    if loops[:-1] != around or not loops:
        return False
    ends = [flow.origin(outside.operand)[-1], *(flow.uses(outside.result) if outside.result is not None else ())]
    if any(v.op is loops[-1] for v in ends):
        return True
    first = re.search(r'"known_init_step":\{"init":"(\d+)"', loops[-1].attributes)
    name = re.search(r'op_name="([^"]*)"', outside.site.op.attributes)
    return first is not None and int(first[1]) > 0 and name is not None and "while/body" in name[1]


def _elements(value: Value) -> int:
    return math.prod(value.array.shape) if value.array is not None else 0


def _gather_as_reduction(flow: Flow, part: Part, form: Form) -> Iterable[Form]:
    """A small all-gather as an all-reduce of zeros into which each device has written its share."""
    if form.kind == "all_reduce":
        last = flow.origin(part.operand)[-1]
        if last.op.opcode == "dynamic-update-slice" and _is_zero(flow, flow.operand(last, 0)):
            yield dataclasses.replace(form, kind="all_gather")


def _is_zero(flow: Flow, value: Value) -> bool:
    last = flow.origin(value)[-1]
    if last.op.opcode == "broadcast":
        last = flow.origin(flow.operand(last, 0))[-1]
    return last.op.opcode == "constant" and last.op.arguments in ("(0)", "(false)")


def _scatter_as_slice(flow: Flow, part: Part, form: Form) -> Iterable[Form]:
    """A reduce-scatter as an all-reduce of whose result nothing is used but each device's share."""
    if form.kind == "all_reduce" and part.result is not None:
        ends = [v for v in flow.uses(part.result, until="dynamic-slice") if v.op.opcode not in LAYOUT]
        shares = [v for v in ends if v.op.opcode == "dynamic-slice" and _elements(v) * part.group == form.elements]
        if ends and len(shares) == len(ends):
            yield dataclasses.replace(form, kind="reduce_scatter")


LAYOUT = {"bitcast", "reshape", "copy", "copy-start", "copy-done", "transpose", "convert"}


def _padded(flow: Flow, part: Part, form: Form) -> Iterable[Form]:
    """An operand padded to the tiles of the memory, or to shares of whole tiles."""
    if form.kind in ("all_reduce", "reduce_scatter"):
        elements = form.elements
        for after, before in itertools.pairwise(flow.origin(part.operand)):
            if after.op.opcode in ("pad", "bitcast") and _elements(before) < _elements(after) == elements:
                elements = _elements(before)
                yield dataclasses.replace(form, elements=elements)


def _moved_cast(flow: Flow, part: Part, form: Form) -> Iterable[Form]:
    """A cast moved from one side of the collective to the other, or into it."""
    around = [v.array for v in flow.origin(part.operand)]
    if part.result is not None:
        around += [part.result.array, *(v.array for v in flow.uses(part.result) if v.op.opcode == "convert")]
    for element in dict.fromkeys(array.element for array in around if array is not None):
        if element != form.element:
            yield dataclasses.replace(form, element=element)


REWRITES: dict[str, Detector] = {
    "all-gather as all-reduce": _gather_as_reduction,
    "reduce-scatter as all-reduce and slice": _scatter_as_slice,
    "padded": _padded,
    "moved cast": _moved_cast,
}


def candidates(flow: Flow, part: Part) -> list[tuple[Form, tuple[str, ...]]]:
    """Every form that a part may have had, each with the rewrites that lead from it to the part, fewest first."""
    found: dict[Form, tuple[str, ...]] = {part.form: part.given}
    for name, detector in REWRITES.items():
        for form, names in list(found.items()):
            for before in detector(flow, part, form):
                found.setdefault(before, (*names, name))
    return sorted(found.items(), key=lambda item: len(item[1]))


def sums_gathered(flow: Flow, part: Part) -> int:
    """How many all-gathers more than itself a part stands for, at most: of the terms of a sum, which the compiler adds
    before it gathers. It names such an all-gather after the addition."""
    name = re.search(r'op_name="([^"]*)"', part.site.op.attributes)
    if part.form.kind != "all_gather" or name is None or name[1].split("/")[-1] not in ("add", "add_any"):
        return 0
    return _terms(flow, part.operand) - 1


def _terms(flow: Flow, value: Value) -> int:
    """The terms of a sum; 1 if it is none."""
    last = flow.origin(value)[-1]
    return sum(_terms(flow, flow.operand(last, i)) for i in range(2)) if last.op.opcode == "add" else 1


def realigns(flow: Flow, site: Site, scatters: set[str]) -> bool:
    """Whether a permute hands on rows of a padded reduce-scatter, whose shares begin elsewhere than planned ones."""
    if site.kind != "permute":
        return False
    made = Value(site.path, site.computation, site.op)
    origin = flow.origin(flow.operand(made, 0))
    return any(v.op.opcode == "slice" for v in origin) and any(v.op.name in scatters for v in origin)
