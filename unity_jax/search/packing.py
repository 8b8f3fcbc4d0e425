"""Whether state that the chosen program concatenates every step is held packed from step to step.

The layouts of the state stay those of the plan found: each device holds of a packed array what it held of its parts, so
that the caller's view is made and unmade without communication. State whose parts do not lie alike, or are split along
the dimension that joins them, and state that the caller has pinned, is not packed.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_jax.pcg.layout import Layout
from unity_jax.program import Program
from unity_jax.rewrite.pack import pack, packed
from unity_jax.rewrite.packing import Group, Packing, others
from unity_jax.search.candidate import Candidate, Pins
from unity_jax.search.limits import LIMITS
from unity_jax.search.planner import Planner


def held(found: Candidate, limit: float, pins: Pins) -> Candidate:
    """The plan with packed state if that is faster, or else the plan. No state is packed where some is on the host."""
    if not found.fits(limit) or found.program.hosted:
        return found
    program, mesh = found.program, found.mesh
    lie = [t.layout for t in found.graph.inputs]
    fixed = {i for i, t in enumerate(program.graph.inputs) if t in pins.tensors}
    fixed |= {program.ties[o] for o in pins.outputs if o in program.ties}

    def layout(packing: Packing, inputs: tuple[int, ...]) -> Layout | None:
        shapes = [program.graph.inputs[i].shape for i in inputs]
        return packing.layout([x for i in inputs if (x := lie[i]) is not None], shapes, mesh)

    def allowed(packing: Packing, inputs: tuple[int, ...]) -> bool:
        return not fixed & {*inputs} and layout(packing, inputs) is not None

    smaller = packed(program, allowed)
    if smaller is program:
        return found
    layouts = [layout(g.packing, g.inputs) for g in smaller.packed]
    planner = Planner(smaller, found.machine, limit, pinned(pins, smaller, layouts))
    made = planner.plan([mesh])
    return made if made.fits(limit) and made.seconds < (1 - LIMITS.packing_saves) * found.seconds else found


def inherited(found: Candidate, limit: float, pins: Pins, handed: Sequence[tuple[Group, Layout]]) -> Candidate:
    """The plan with the state packed that another function hands over so: to cut it apart takes memory, and time."""
    if not handed:
        return found
    smaller = pack(found.program, [group for group, _ in handed])
    fixed = pinned(pins, smaller, [layout for _, layout in handed])
    made = Planner(smaller, found.machine, limit, fixed).plan([found.mesh])
    return made if made.fits(limit) else found


def pinned(pins: Pins, program: Program, layouts: Sequence[Layout | None]) -> Pins:
    """The pins of the caller's program for the packed one, whose packed state has these layouts."""
    assert program.unpacked is not None
    results = others(len(program.unpacked.graph.outputs), program.leaving)
    at = {o: n for n, o in enumerate(results)}
    wholes = program.graph.inputs[-len(program.packed) :]
    fixed = {t: x for t, x in zip(wholes, layouts, strict=True) if x is not None}
    return Pins({**pins.tensors, **fixed}, {at[o]: x for o, x in pins.outputs.items() if o in at})
