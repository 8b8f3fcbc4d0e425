"""Every byte of communication of a compiled program, put down to the plan.

    found = account(planned, parse(compiled.as_text()), axes, duplicates=())
    found.rewrites
    # Counter({'combined': 12, 'moved cast': 3})
    found.unexplained
    # []

Compiled collectives are matched to planned ones, with as few rewrites (`aot.rewrites`) as can explain them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from unity_jax.aot.collectives import Collective, Key
from unity_jax.aot.flow import Flow
from unity_jax.aot.hlo import Module
from unity_jax.aot.rewrites import SUMMED, Part, candidates, parts, realigns, rejoined, sums_gathered
from unity_jax.aot.sites import Site, sites
from unity_jax.pcg.mesh import MeshAxes

MERGED, REALIGNED = "merged duplicates", "shares realigned by permutes"
Planned = tuple[Key, int]
"""A planned collective and how often it runs in a step."""


@dataclass(frozen=True)
class Account:
    """How a compiled program keeps to a plan.

    **Fields:** `rewrites`: how many arrays each was found on; `unexplained`: a line for every planned collective that
    nothing in the program stands for, and every compiled one that stands for nothing planned.
    """

    rewrites: Counter[str]
    unexplained: list[str]


def account(
    planned: Iterable[tuple[Collective, int]], module: Module, mesh: MeshAxes, duplicates: Iterable[Collective]
) -> Account:
    """Account for the collectives of a compiled module.

    **Arguments:** `planned`: each with its trips; `duplicates`: of the planned ones, those whose value another planned
    one has as well (`aot.duplicates`), which a compiler may leave out.
    """
    flow, found = Flow(module), sites(module, mesh)
    rewrites: Counter[str] = Counter()
    wanted: list[Planned] = [((c.kind, c.axes, c.bytes), trips) for c, trips in planned for _ in range(c.count)]
    present = rejoined(flow, [part for site in found for part in parts(flow, site, mesh)])
    forms = [{(form.key, form.trips): names for form, names in reversed(candidates(flow, p))} for p in present]
    spare: list[dict[Planned, tuple[str, ...]]] = [
        {(key, trips): (MERGED,) for key, trips in wanted if key == (c.kind, c.axes, c.bytes)}
        for c in duplicates
        for _ in range(c.count)
    ]
    for made, part in zip(forms, present, strict=True):
        spare += [dict.fromkeys(made, (SUMMED,))] * sums_gathered(flow, part)
    rows = forms + spare
    pairs, missing, extra = _match(rows, wanted)
    compiled = {wanted[j] for i, j in pairs if i < len(present)}
    for i, j in pairs:
        if i < len(present) or wanted[j] in compiled:
            rewrites.update(set(rows[i][wanted[j]]))
        else:
            missing.append(j)
    lines = [f"planned, not compiled: {Collective(*wanted[j][0])}, {wanted[j][1]} times a step" for j in missing]
    scatters = {name for s in found if s.kind == "reduce_scatter" for name in _names(s)}
    for part in (present[i] for i in extra if i < len(present)):
        if realigns(flow, part.site, scatters):
            rewrites[REALIGNED] += 1
        else:
            lines.append(f"compiled, not planned: {_text(part)}")
    return Account(rewrites, lines)


def _names(site: Site) -> list[str]:
    """The instruction of a collective, and the fusion that it is the whole of."""
    return [site.op.name, *(caller.name for _, caller in site.path[-1:] if caller.opcode == "fusion")]


def _text(part: Part) -> str:
    s = part.site
    whole = Collective(s.kind, s.axes, s.bytes)
    return (
        f"{whole}, {s.trips} times a step: {s.op.name} = {s.op.type} {s.op.opcode}{s.op.arguments} in {s.computation}"
    )


def _match(
    present: Sequence[dict[Planned, tuple[str, ...]]], wanted: Sequence[Planned]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs of a present and a planned one, so that few are left over, then few count as merged or summed, then few
    rewrites are needed; and the planned and the present ones left over."""
    none = 1000.0
    cost = np.full((len(present), len(wanted)), none)
    for i, forms in enumerate(present):
        for j, key in enumerate(wanted):
            if key in forms:
                cost[i, j] = 10 if {MERGED, SUMMED}.intersection(forms[key]) else len(forms[key])
    rows, columns = linear_sum_assignment(cost)
    pairs = [(int(i), int(j)) for i, j in zip(rows, columns, strict=True) if cost[i, j] < none]
    missing = sorted(set(range(len(wanted))) - {j for _, j in pairs})
    extra = sorted(set(range(len(present))) - {i for i, _ in pairs})
    return pairs, missing, extra
