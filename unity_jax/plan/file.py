"""Plan files: versioned JSON with everything a plan says and decides, and nothing of its program."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from unity_jax import _compat
from unity_jax.errors import PlanError
from unity_jax.implement import record as implement
from unity_jax.network.collectives import Collective
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan.record import Record, check
from unity_jax.plan.value import Leaf, PlanValue, Predicted
from unity_jax.residuals.record import from_json, to_json
from unity_jax.rewrite.packing import Packed, Packing
from unity_jax.rewrite.record import Rewrite
from unity_jax.search.searched import UNKNOWN, Searched

P = TypeVar("P", bound=PlanValue)

FORMAT = "unity_jax plan"
VERSION = 7
READABLE = (3, 4, 5, 6, VERSION)
"""Versions of plan files that can be read. In those of version 3 no state is packed; before version 5 rules had other
names, so that a plan with rewrites can be read, but not run; before version 6 all is kept for the backward pass; before
version 7 nothing is a kernel that was not written so."""


def save(plan: PlanValue, path: Path) -> None:
    """Write a plan as JSON of this `VERSION`."""
    path.write_text(to_text(plan))


def to_text(plan: PlanValue) -> str:
    """What the file of a plan holds: equal plans, equal text."""
    return json.dumps(_plan_json(plan), indent=1) + "\n"


def load(path: Path, kind: type[P]) -> P:
    """Read a plan of a class.

    Raises `PlanError` for a file that is missing, damaged, or of another version.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise PlanError(f"there is no plan file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{str(path)!r} is not a plan file: {error}. Save the plan again.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{str(path)!r} is not a plan file (no format {FORMAT!r})")
    if data.get("version") not in READABLE:
        raise PlanError(
            f"{str(path)!r} has plan version {data.get('version')}, this unity_jax reads version "
            f"{', '.join(map(str, READABLE))}: plan again"
        )
    try:
        return _plan(data, kind)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlanError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}. Save the plan again.") from None


def _plan_json(plan: PlanValue) -> dict[str, Any]:
    axes = plan.axes
    return {
        "format": FORMAT,
        "version": VERSION,
        "function": plan.function,
        "program": plan.program_hash,
        "machine": plan.machine,
        "machine_hash": plan.machine_hash,
        "memory_limit": plan.memory_limit,
        "margin": plan.margin,
        "mesh": {"names": axes.names, "sizes": axes.sizes, "order": axes.order},
        "unequal": plan.unequal,
        "label": plan.label,
        "replicated": plan.replicated,
        "implementations": [implement.to_json(done) for done in plan.implementations],
        "rewrites": [r.to_json() for r in plan.rewrites],
        "saving": [to_json(s) for s in plan.saving],
        "packed": [_packed_json(p) for p in plan.packed],
        "searched": asdict(plan.searched),
        "largest": plan.largest,
        "predicted": asdict(plan.predicted),
        "inputs": [_leaf_json(leaf) for leaf in plan.inputs],
        "outputs": [_leaf_json(leaf) for leaf in plan.outputs],
        "decisions": {
            "keep": plan.record.keep,
            "strategies": plan.record.strategies,
            "layouts": [_layout_json(x) for x in plan.record.layouts],
            "outputs": [_layout_json(x) for x in plan.record.outputs],
            "rings": plan.record.rings,
        },
    }


def _packed_json(packed: Packed) -> dict[str, Any]:
    packing = packed.packing
    return {
        "shapes": packing.shapes,
        "dimension": packing.dimension,
        "inputs": packed.inputs,
        "outputs": packed.outputs,
    }


def _packed(data: dict[str, Any]) -> Packed:
    packing = Packing(tuple(tuple(map(int, s)) for s in data["shapes"]), int(data["dimension"]))
    return Packed(packing, tuple(map(int, data["inputs"])), tuple(map(int, data["outputs"])))


def _layout_json(layout: Layout | None) -> Any:
    return None if layout is None else [layout.dims, layout.partial]


def _layout(data: Any) -> Layout:
    dims, partial = data
    return Layout(tuple(tuple(map(str, d)) for d in dims), tuple((str(a), str(r)) for a, r in partial))


def _leaf_json(leaf: Leaf) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "layout": _layout_json(leaf.layout),
        "bytes": leaf.bytes,
        "on_host": leaf.on_host,
    }


def _leaf(data: dict[str, Any], axes: MeshAxes) -> Leaf:
    shape, layout = tuple(map(int, data["shape"])), _layout(data["layout"])
    check(layout, shape, axes, f"the layout of {data['path']}", boundary=True)
    on_host = bool(data.get("on_host", False))  # files that were written before there was that have none
    return Leaf(str(data["path"]), shape, str(data["dtype"]), layout, int(data["bytes"]), on_host)


def _predicted(data: dict[str, Any]) -> Predicted:
    found = tuple(Collective(**{**c, "axes": tuple(c["axes"])}) for c in data["collectives"])
    of = {"peak_bytes": int}
    figures: dict[str, Any] = {k: of.get(k, float)(v) for k, v in data.items() if k != "collectives"}
    return Predicted(**figures, collectives=found)


def _plan(data: dict[str, Any], kind: type[P]) -> P:
    d = data["decisions"]
    record = Record(
        bool(d["keep"]),
        tuple(None if s is None else tuple(map(int, s)) for s in d["strategies"]),
        tuple(None if x is None else _layout(x) for x in d["layouts"]),
        tuple(map(_layout, d["outputs"])),
        # Files that were written before there were rings have none.
        tuple((int(op), int(side)) for op, side in d.get("rings", ())),
    )
    names, sizes, order = (data["mesh"][key] for key in ("names", "sizes", "order"))
    axes = MeshAxes(tuple(map(str, names)), tuple(map(int, sizes)), tuple(map(int, order)))
    return kind(
        _compat.abstract_mesh(axes.names, axes.sizes),
        str(data["machine"]),
        float(data["memory_limit"]),
        _predicted(data["predicted"]),
        tuple(_leaf(leaf, axes) for leaf in data["inputs"]),
        tuple(_leaf(leaf, axes) for leaf in data["outputs"]),
        tuple((str(n), int(b)) for n, b in data["largest"]),
        str(data["label"]),
        tuple(map(str, data["replicated"])),
        str(data["program"]),
        str(data["function"]),
        record,
        axes.order,
        str(data["unequal"]),
        tuple(map(Rewrite.from_json, data["rewrites"])),
        tuple(map(_packed, data.get("packed", ()))),
        # Files that were written before plans said so say nothing.
        Searched.from_json(data["searched"]) if "searched" in data else UNKNOWN,
        str(data.get("machine_hash", "")),  # files that were written before it was known have none
        tuple(map(from_json, data.get("saving", ()))),
        int(data.get("margin", 0)),
        tuple(map(implement.from_json, data.get("implementations", ()))),
    )
