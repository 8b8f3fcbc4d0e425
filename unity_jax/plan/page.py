"""A plan as one HTML file: its tables, pictures of the simulated step and of the memory, and the planned program.

Nothing is loaded from elsewhere: the page can be mailed, or kept beside a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from unity_jax.plan import trace_events
from unity_jax.plan.memory import KINDS, Bytes, MemoryProfile, memory
from unity_jax.plan.table import table
from unity_jax.plan.value import PlanValue
from unity_jax.text import seconds, short_source, size

WIDTH, ROW, GAP = 1200, 26, 8  # of the picture, in pixels
LABEL = 220  # of these for the names of the rows
COLOURS = {
    "compute": "#4c78a8",
    "all-gather": "#e45756",
    "reduce-scatter": "#f58518",
    "all-reduce": "#b279a2",
    "all-to-all": "#72b7b2",
}
OTHER = "#9d9d9d"
COLUMNS = 500  # of the picture of memory
AREAS = "#4c78a8 #9ecae9 #bab0ac #d8b5a5 #e45756 #ff9da6 #f58518 #72b7b2 #eeca3b #e3e3e3".split()
STYLE = (
    "body{font:14px/1.5 sans-serif;margin:2em auto;max-width:1240px;padding:0 1em}"
    "pre{font:12px/1.35 monospace;overflow-x:auto;background:#f6f6f6;padding:1em}"
    "svg{width:100%;height:auto}h2{margin-top:1.5em}summary{cursor:pointer}"
)


def page(plan: PlanValue) -> str:
    """The HTML text. A loaded plan that has not met its function has no timeline and no program to show."""
    parts = [f"<h1>{escape(plan.function)} on {escape(plan.machine)}</h1>", f"<pre>{escape(table(plan))}</pre>"]
    if plan.program is not None and plan.priced_on is not None:
        trace = trace_events.trace(plan.timeline(), plan.priced_on)
        found = memory(plan)
        parts += [
            "<h2>One step of one device, as simulated</h2>",
            _picture(trace["traceEvents"], plan.predicted.step_seconds),
            "<h2>Memory of one device over the step</h2>",
            _stacked(found),
            f"<pre>{escape(str(found))}</pre>",
            f"<details><summary>The planned program</summary><pre>{escape(str(plan.pcg))}</pre></details>",
        ]
    head = f'<meta charset="utf-8"><title>{escape(plan.function)}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _picture(events: list[dict[str, Any]], step: float) -> str:
    """One row per stream, one box per task; pointing at a box tells what it is, how long it takes and for which line.

    **Arguments:** `events` as in a trace, times in microseconds; `step` in seconds.
    """
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    top = {row: i * (ROW + GAP) for i, row in enumerate(sorted(names))}
    scale = (WIDTH - LABEL) / (step * 1e6)
    height = len(names) * (ROW + GAP) + ROW
    drawn = [f'<text x="0" y="{top[row] + ROW * 0.7:.0f}">{escape(name)}</text>' for row, name in names.items()]
    for e in events:
        if e["ph"] == "X":
            told = f"{e['name']}, {seconds(e['dur'] / 1e6)}\n{short_source(e['args']['source'])}"
            drawn.append(
                f'<rect x="{LABEL + e["ts"] * scale:.2f}" y="{top[e["tid"]]}" width="{max(e["dur"] * scale, 0.1):.2f}" '
                f'height="{ROW}" fill="{_colour(e, names)}"><title>{escape(told)}</title></rect>'
            )
    for part in range(5):
        x = LABEL + part / 4 * (WIDTH - LABEL)
        anchor = "end" if part == 4 else "middle" if part else "start"
        time = seconds(step * part / 4)
        drawn.append(f'<text x="{x:.0f}" y="{height - 6}" text-anchor="{anchor}">{time}</text>')
    return _svg(height, drawn)


def _svg(height: int, drawn: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


def _stacked(found: MemoryProfile) -> str:
    """Bytes by kind, one area on the other, and the limit if it is near."""
    height, step = 260, found.over_step[-1][0]
    near = found.limit if found.limit < 2 * found.peak_bytes else 0.0
    top = 1.05 * max(near, found.peak_bytes, 1)
    moments = _thinned(found.over_step)
    xs = [LABEL + at / (step or 1) * (WIDTH - LABEL) for at, _ in moments]
    below, drawn = [0] * len(xs), []
    shown = [kind for kind in KINDS if any(kind in now for _, now in moments)]
    for n, kind in enumerate(shown):
        above = [y + now.get(kind, 0) for y, (_, now) in zip(below, moments, strict=True)]
        outline = [*_stairs(xs, above), *reversed(_stairs(xs, below))]
        points = " ".join(f"{x:.1f},{height * (1 - y / top):.1f}" for x, y in outline)
        told = f"{kind}, {size(max(a - b for a, b in zip(above, below, strict=True)))} at most"
        drawn.append(f'<polygon points="{points}" fill="{AREAS[n]}"><title>{escape(told)}</title></polygon>')
        drawn.append(f'<rect x="0" y="{n * 22}" width="14" height="14" fill="{AREAS[n]}"/>')
        drawn.append(f'<text x="20" y="{n * 22 + 12}">{escape(kind)}</text>')
        below = above
    for what, y in (("limit", near), ("peak", float(found.peak_bytes))):
        if y:
            at = height * (1 - y / top)
            drawn.append(f'<path d="M{LABEL} {at:.1f}H{WIDTH}" stroke="#333" stroke-dasharray="4"/>')
            drawn.append(f'<text x="{WIDTH}" y="{at - 4:.1f}" text-anchor="end">{what} {size(y)}</text>')
    return _svg(height, drawn)


def _stairs(xs: list[float], ys: list[int]) -> list[tuple[float, int]]:
    """The corners of a line that keeps each value until the next one."""
    return [(x, y) for x, last, y in zip(xs, [ys[0], *ys], ys, strict=False) for y in (last, y)]


def _thinned(moments: Sequence[tuple[float, Bytes]]) -> list[tuple[float, Bytes]]:
    """As many moments as the picture has columns: of those in one column that with most bytes."""
    found: dict[int, tuple[float, Bytes]] = {}
    end = moments[-1][0] or 1.0
    for at, now in moments:
        column = int(at / end * COLUMNS)
        if column not in found or sum(now.values()) > sum(found[column][1].values()):
            found[column] = (at, now)
    return list(found.values())


def _colour(event: dict[str, Any], names: dict[int, str]) -> str:
    if names[event["tid"]] == "compute":
        return COLOURS["compute"]
    return next((c for kind, c in COLOURS.items() if event["name"].replace("_", "-").startswith(kind)), OTHER)
