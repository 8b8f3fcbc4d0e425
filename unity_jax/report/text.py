"""Plans as text: the table a person wants first, and the difference of two plans."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from unity_jax.plan import Leaf, Plan


def table(plan: Plan) -> str:
    """Mesh and predictions, then layouts (equal leaves of repeated layers on one row), then collectives, then remarks."""
    from unity_jax.plan import mesh_axes

    p = plan.predicted
    lines = [
        f"Plan of {plan.function} on {plan.machine}: mesh ({mesh_axes(plan.mesh)}), found by {plan.label}",
        f"  step {seconds(p.step_seconds)} = compute {seconds(p.compute_seconds)} + exposed communication "
        f"{seconds(p.exposed_communication_seconds)}; {p.flops:.3g} flops per device",
        f"  peak memory {size(p.peak_bytes)} of {size(plan.memory_limit)} per device" + ("" if plan.fits else "  DOES NOT FIT"),
    ]
    layouts = Table("argument", "count", "type and layout", "per device", title="Layouts", title_justify="left")
    for group in _grouped(plan.inputs):
        layouts.add_row(group[0].path + (" ..." if len(group) > 1 else ""), str(len(group)), str(group[0]), size(sum(g.bytes for g in group)))
    moves = Table("collective", "axes", "bytes", "count", "trips", "seconds in all", "serves", title="Collectives", title_justify="left")
    for c in p.collectives[:20]:
        moves.add_row(
            c.kind, ",".join(c.axes), size(c.bytes), str(c.count), str(c.trips), seconds(c.seconds * c.count * c.trips), c.source
        )
    if len(p.collectives) > 20:
        rest = p.collectives[20:]
        total = sum(c.seconds * c.count * c.trips for c in rest)
        moves.add_row(f"{len(rest)} more", "", "", str(sum(c.count for c in rest)), "", seconds(total), "")
    text = "\n".join(lines) + "\n" + render(layouts) + render(moves)
    if plan.replicated:
        text += "Computed in full on every device, for want of a rule:\n" + "".join(f"  {r}\n" for r in plan.replicated)
    return text


def compare(plan: Plan, other: Plan) -> str:
    """Predictions side by side, then the leaves whose layouts differ."""
    from unity_jax.plan import mesh_axes

    a, b = plan.predicted, other.predicted
    rows = Table("", "this plan", "other plan")
    rows.add_row("mesh", str(mesh_axes(plan.mesh)), str(mesh_axes(other.mesh)))
    rows.add_row("found by", plan.label, other.label)
    rows.add_row("step", seconds(a.step_seconds), seconds(b.step_seconds))
    rows.add_row("compute", seconds(a.compute_seconds), seconds(b.compute_seconds))
    rows.add_row("exposed communication", seconds(a.exposed_communication_seconds), seconds(b.exposed_communication_seconds))
    rows.add_row("peak memory", size(a.peak_bytes), size(b.peak_bytes))
    theirs = {leaf.path: leaf for leaf in other.inputs}
    for leaf in plan.inputs:
        match = theirs.get(leaf.path)
        if match is None or str(match) != str(leaf):
            rows.add_row(leaf.path, str(leaf), str(match) if match else "missing")
    for path in theirs.keys() - {leaf.path for leaf in plan.inputs}:
        rows.add_row(path, "missing", str(theirs[path]))
    return render(rows)


def _grouped(leaves: tuple[Leaf, ...]) -> list[list[Leaf]]:
    """Leaves that differ only in the numbers in their paths, such as those of repeated layers, together."""
    import re

    groups: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault((re.sub(r"\d+", "#", leaf.path), str(leaf)), []).append(leaf)
    return list(groups.values())


def render(content: Table) -> str:
    """A rich table as plain text, as wide as it needs."""
    out = io.StringIO()
    Console(file=out, width=200).print(content)
    return out.getvalue()


def seconds(x: float) -> str:
    """`1.23 ms`"""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if x >= scale:
            return f"{x / scale:.3g} {unit}"
    return "0 s" if x == 0 else f"{x:.2g} s"


def size(n: float) -> str:
    """`1.5 GiB`"""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.4g} {unit}"
    return f"{n:.0f} B"
