"""Plans as text: the table a person wants first, and the difference of two plans.

Equal subtrees of arguments stand on one row: `[0].params['layers'][0..23]['{query,value}']['kernel']` is 48 leaves.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import rich.box
from rich.console import Console
from rich.table import Table

from unity_jax.pcg.mesh import MeshAxes

if TYPE_CHECKING:
    from unity_jax.network.collectives import Collective
    from unity_jax.plan import Plan
    from unity_jax.search.searched import Searched

WIDTH = 100
WORTH_A_LINE = 2.0  # times its lower bound that a step may take for the bound to be told
SHOWN = 16  # rows of collectives, most expensive first
SHOWN_GROUPS = 4  # of the innermost mesh axis, where the placement is told


def table(plan: Plan) -> str:
    """Mesh and predictions, then layouts with equal leaves on one row, then collectives, then remarks."""
    p = plan.predicted
    lines = [
        f"Plan of {plan.function} for {plan.machine}: mesh ({plan.axes}), found by {plan.label}",
        f"  step         {seconds(p.step_seconds)} = {seconds(p.compute_seconds)} compute + "
        f"{seconds(p.exposed_communication_seconds)} exposed communication",
    ]
    if p.lower_bound_seconds > 0 and p.step_seconds <= WORTH_A_LINE * p.lower_bound_seconds:
        gap = p.step_seconds / p.lower_bound_seconds - 1
        faster = "faster" if gap < 5e-5 else f"more than {gap:.2%} faster"
        form = "as rewritten" if plan.rewrites else "as written"
        lines.append(
            f"  lower bound  {seconds(p.lower_bound_seconds)}: {form}, no plan for this mesh and machine is {faster}"
        )
    if plan.searched.meshes:
        lines.append(f"  searched     {extent(plan.searched)}")
    lines.append(f"  work         {p.flops:.3g} flops per device")
    lines.append(
        f"  peak memory  {size(p.peak_bytes)} of {size(plan.memory_limit)} per device"
        + ("" if plan.fits else "  DOES NOT FIT; largest at the peak:")
    )
    if not plan.fits:
        lines += [f"    {size(n):>12}  {name}" for name, n in plan.largest[:5]]
    if plan.order:
        lines.append(f"  placement    {placement(plan.axes)}")
    if plan.unequal:
        lines.append(f"  pace         {plan.unequal}")
    if plan.rewrites:
        lines.append("  rewritten    " + "\n               ".join(map(str, plan.rewrites)))
    if plan.packed:
        lines.append(f"  packed       {held(plan)}")
    text = "\n".join(lines) + "\n\n" + render(_layouts(plan)) + "\n" + render(_collectives(p.collectives))
    if plan.replicated:
        lines = [f"{_wrapped(r)}\n" for r in plan.replicated]
        text += "\nComputed in full on every device:\n" + "".join(lines)
    return text


def extent(searched: Searched) -> str:
    """`1 of 3 meshes, exactly; 5 of 32 rewritten programs`."""
    tried, every = len(searched.meshes), len(searched.meshes) + len(searched.skipped)
    meshes = f"{tried} of {every} meshes" if searched.skipped else f"{tried} mesh{'es' * (tried > 1)}"
    count = len(searched.inexact)
    how = (f"{count} of them " if count < tried else "") + "not exactly" if count else "exactly"
    if not searched.allowed:
        rewrites = "none rewritten"
    elif not searched.variants:
        rewrites = "no rewrite was worth a plan"
    else:
        ended = ", where the budget ended" if searched.out_of_budget else ""
        rewrites = f"{searched.variants} of {searched.allowed} rewritten programs{ended}"
    compiled = f"; the best of {searched.compiled} as compiled" if searched.compiled else ""
    return f"{meshes}, {how}; {rewrites}{compiled}"


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def sweep(plans: Sequence[Plan], grows: bool) -> str:
    """Plans of one function for several numbers of devices, one a row.

    **Arguments:** `grows`: whether the work is so much for each device (weak scaling), and not the same for all plans.
    **Returns:** `efficiency` is the work done per second and device, over that of the first plan; `!` marks a plan that
    needs more memory than there is.
    """
    rows = columns("devices", "mesh", "found by", "step", "exposed", "memory", "efficiency", right=range(3, 7))
    first = plans[0]
    for plan in plans:
        p, spread = plan.predicted, 1 if grows else plan.axes.num_devices / first.axes.num_devices
        rows.add_row(
            str(plan.axes.num_devices),
            str(plan.axes),
            plan.label,
            seconds(p.step_seconds),
            seconds(p.exposed_communication_seconds),
            size(p.peak_bytes) + "!" * (not plan.fits),
            f"{first.predicted.step_seconds / p.step_seconds / spread:.0%}",
        )
    machines = ", ".join(dict.fromkeys(plan.machine for plan in plans))
    return f"Plans of {first.function} for {machines}\n\n{render(rows)}"


def held(plan: Plan) -> str:
    """How much of the arguments is held packed from step to step."""
    count = sum(len(p.inputs) for p in plan.packed)
    nbytes = sum(plan.inputs[i].bytes for p in plan.packed for i in p.inputs)
    return f"{count} arguments ({size(nbytes)} per device) are held as {len(plan.packed)} arrays from step to step"


def compare(plan: Plan, other: Plan) -> str:
    """Predictions side by side, then the leaves whose layouts differ."""
    a, b = plan.predicted, other.predicted
    rows = columns("", "this plan", "other plan")
    rows.add_row("mesh", str(plan.axes), str(other.axes))
    if plan.order or other.order:
        rows.add_row("placement", placement(plan.axes), placement(other.axes))
    rows.add_row("machine", plan.machine, other.machine)
    rows.add_row("found by", plan.label, other.label)
    rows.add_row("step", seconds(a.step_seconds), seconds(b.step_seconds))
    rows.add_row("compute", seconds(a.compute_seconds), seconds(b.compute_seconds))
    rows.add_row(
        "exposed communication", seconds(a.exposed_communication_seconds), seconds(b.exposed_communication_seconds)
    )
    rows.add_row("peak memory", size(a.peak_bytes), size(b.peak_bytes))
    if plan.packed != other.packed:
        rows.add_row("packed", *(held(x) if x.packed else "nothing" for x in (plan, other)))
    ours, theirs = ({leaf.path: str(leaf) for leaf in x.inputs} for x in (plan, other))
    cells = {path: (ours.get(path, "missing"), theirs.get(path, "missing")) for path in [*ours, *theirs]}
    for row in _rows(_tree((path, c, 0) for path, c in cells.items() if c[0] != c[1]), 2):
        rows.add_row(row.name, *row.cells)
    return render(rows)


def placement(axes: MeshAxes) -> str:
    """Network positions in mesh order, the groups of the innermost axis apart: `0..3 | 5,4,7,6`."""
    order, inner = list(axes.order or range(axes.num_devices)), axes.sizes[-1]
    groups = [_ranges(order[i : i + inner]) for i in range(0, len(order), inner)]
    rest = len(groups) - SHOWN_GROUPS
    return " | ".join(groups[:SHOWN_GROUPS]) + (f" | {rest} more" if rest > 0 else "")


# Layouts


def _layouts(plan: Plan) -> Table:
    rows = columns("argument", "leaves", "type and layout", "per device", right=(1, 3), title="Layouts")
    tree = _tree((leaf.path, (str(leaf),), leaf.bytes) for leaf in plan.inputs)
    for row in _rows(tree, 1, [leaf.path for leaf in plan.inputs if leaf.layout.is_replicated]):
        rows.add_row(row.name, str(row.count), row.cells[0], size(row.bytes))
    return rows


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
class _Row:
    """A subtree whose leaves are on the rows below it, or leaves that read alike (`cells`)."""

    name: str
    count: int
    cells: tuple[str, ...]
    bytes: int


_PART = re.compile(r"""\[(?:'[^']*'|"[^"]*"|[^\]]*)\]|\.?[^.\[]+""")


def _tree(leaves: Iterable[tuple[str, tuple[str, ...], int]]) -> _Node:
    root = _Node()
    for path, cells, nbytes in leaves:
        node = root
        for part in _PART.findall(path):
            node = node.children.setdefault(part, _Node())
        node.path, node.cells, node.bytes = path, cells, nbytes
    return root


def _rows(root: _Node, columns: int, replicated: Iterable[str] = ()) -> list[_Row]:
    """Rows in the order of the arguments, indented below their subtree.

    Equal siblings share a row, and a subtree that reads as an earlier one refers to it.

    **Arguments:** `replicated`: paths of leaves to sum up with any siblings of which that is all there is to say.
    """
    known = set(replicated)
    rows: list[_Row] = []
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
                rows.append(_Row(indent + name, count, cells.pop() or (), nbytes))
            elif summed:
                rows.append(_Row(indent + name, count, ("replicated",), nbytes))
            elif earlier:
                rows.append(_Row(indent + name, count, (f"as {earlier}",) + ("",) * (columns - 1), nbytes))
            else:
                seen.update((c.signature, path + n) for n, c in passed)
                rows.append(_Row(indent + name, count, ("",) * columns, nbytes))
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
        return f"[{_ranges([int(part[1:-1]) for part in parts])}]"
    if kinds == {"key"}:
        return "['{" + _listing([part[2:-2] for part in parts]) + "}']"
    if kinds == {"field"}:
        return ".{" + _listing([part.removeprefix(".") for part in parts]) + "}"
    return "{" + _listing(parts) + "}"


def _ranges(numbers: Sequence[int]) -> str:
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


# Collectives


def _collectives(found: Sequence[Collective]) -> Table:
    """Collectives of one kind for one line are one row, in order of total time."""
    groups: dict[tuple[str, str, tuple[str, ...], int, str], list[Collective]] = {}
    for c in found:
        groups.setdefault((c.kind, c.of, c.axes, c.trips, short_source(c.source)), []).append(c)
    totals = sorted(((_total(cs), key) for key, cs in groups.items()), key=lambda t: -t[0][2])
    rows = columns(
        "collective", "axes", "count", "bytes", "time", "serves", right=(2, 3, 4), title="Collectives in one step"
    )
    for (count, nbytes, time), (kind, of, axes, trips, source) in totals[:SHOWN]:
        times = f"{count} x {trips}" if trips > 1 else str(count)
        name = f"{kind} ({of})" if of else kind  # a permute of a decomposed collective
        rows.add_row(name.replace("_", "-"), ",".join(axes), times, size(nbytes), seconds(time), source)
    if len(totals) > SHOWN:
        count, nbytes, time = (sum(t[0][i] for t in totals[SHOWN:]) for i in range(3))
        rows.add_row(f"{len(totals) - SHOWN} more rows", "", str(count), size(nbytes), seconds(time), "")
    rows.add_section()
    count, nbytes, time = _total(found)
    rows.add_row("total", "", str(count), size(nbytes), seconds(time), "")
    return rows


def _total(found: Iterable[Collective]) -> tuple[int, int, float]:
    """Places in the program, bytes and seconds of one step."""
    cs = list(found)
    return (
        sum(c.count for c in cs),
        sum(c.count * c.trips * c.bytes for c in cs),
        sum(c.count * c.trips * c.seconds for c in cs),
    )


def short_source(source: str) -> str:
    """`/home/me/project/models/bert.py:110:18 (Attention.__call__)` -> `models/bert.py:110 (Attention.__call__)`."""
    match = re.fullmatch(r"(.*?)(:\d+)(?::\d+)?( \(.*\))?", source)
    if match is None:
        return source
    path, line, function = match.groups("")
    return "/".join(re.split(r"[/\\]", path)[-2:]) + line + function


# Shared


def columns(*columns: str, right: Sequence[int] = (), title: str | None = None) -> Table:
    rows = Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for i, name in enumerate(columns):
        rows.add_column(name, justify="right" if i in right else "left", overflow="fold", no_wrap=i in right)
    return rows


def render(content: Table) -> str:
    """A rich table as plain text, at most 100 columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    console.print(content)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines() if line.strip())


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
