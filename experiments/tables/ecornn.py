"""EcoRNN's headline (Zheng et al., arXiv 1805.08899) beside ours: LSTMs of its word language model.

    python -m experiments.tables.ecornn                 # half an hour; needs the extras tpu-aot and gpu-aot
    python -m experiments.tables.ecornn --on v100-summit:1x1,h100:1

Two layers of 650 features, 35 steps of 32 examples (`models/lstm_lm.py`, medium), on one device: *layers* are the two
and their gradients, as a `scan` over time has them, *step* is the whole train step, with dropout, embedding and
vocabulary. Milliseconds of one device as `experiments/one_device.py` reads them from what the real XLA:TPU and XLA:GPU
compiled. *Written*: under plain `jax.jit`. *Divided*: products of inputs run once before the loop, gradients of weights
once after it (`implement.loops`), as cuDNN has them (Appleyard et al., arXiv 1604.01946). *Kernels*: what is left of a
loop is one kernel (`implement.persistent`), which TPUs have. *Predicted* is what the planner says, and all that there
is of a V100, the nearest to the GPUs of the paper.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import models
from experiments.made_by import COMPILED
from experiments.one_device import ONE, milliseconds, plain, planned
from experiments.published import figures
from experiments.rows import Row, Rows
from experiments.scheduled import arguments, tabulate
from experiments.tables.recurrent import FORMS, lstm
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.identity import identity
from unity_jax.search.joint import one_device

RESULTS = Path(__file__).parents[1] / "results" / "ecornn.csv"
SETTINGS = ("topology", "part", "dtype")
CODE = (
    *COMPILED,
    "experiments/one_device.py",
    "models/lstm_lm.py",
    "models/_recurrent.py",
    *(f"experiments/tables/recurrent.py:{name}" for name in ("FORMS", "_kernels", "lstm")),
    *(f"experiments/tables/ecornn.py:{name}" for name in ("measure", "forms", "layers", "step", "LAYERS", "SHAPE")),
)
TOPOLOGIES = ("v5e:2x4", "v6e:2x4", "h100:1", "v100-summit:1x1")
PREDICTED = ("v100-summit:1x1",)
"""For which there is no judge of what is compiled."""
LAYERS = 2
SHAPE = (35, 32, 650)
"""Steps, examples, features."""
PARTS = ("layers", "step")
Step = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, the shapes of its arguments, and which of them it may write over."""


def layers(dtype: str) -> Step:
    """The LSTMs and the gradients of their weights and inputs, states in float32."""
    _, examples, width = SHAPE

    def outputs(weights: Any, xs: Any) -> Any:
        for pair in weights:
            start = (jnp.zeros((examples, width)),) * 2
            xs = jax.lax.scan(lambda carry, x, pair=pair: lstm(pair, carry, x), start, xs)[1]
        return xs

    def both(weights: Any, xs: Any, cotangent: Any) -> Any:
        ys, pull = jax.vjp(outputs, weights, xs)
        return ys, pull(cotangent)

    weight, xs = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((width, 4 * width), SHAPE))
    return both, (((weight, weight),) * LAYERS, xs, xs), ()


def step(dtype: str) -> Step:
    """The train step of the word language model."""
    length, examples, hidden = SHAPE
    fields = {"layers": LAYERS, "length": length, "batch_size": examples, "hidden": hidden, "dtype": jnp.dtype(dtype)}
    model = models.get("lstm_lm", "medium", **fields)
    return model.train_step, (model.abstract_state(), model.abstract_batch()), (0,)


def forms(on: str) -> list[str]:
    """The forms that a device has."""
    return [name for name in FORMS if name != "kernels" or Machine.preset(on).device.compiler == "tpu"]


def measure(on: str, part: str, dtype: str) -> dict[str, Any]:
    """One row: milliseconds of each form, by the compiler and by the planner."""
    fn, shapes, donated = {"layers": layers, "step": step}[part](dtype)
    machine, program = one_device(Machine.preset(on)), trace(fn, shapes, {}, donate_argnums=donated)
    found = dict[str, Any]()
    for name in forms(on):
        plan = identity(program.rewritten(FORMS[name](program.graph, machine.device), ()), machine, ONE)
        found[f"{name} predicted ms"] = 1e3 * plan.seconds
        if on not in PREDICTED:
            lowered = plain(fn, shapes, on, donated) if name == "written" else planned(plan, on)
            found[f"{name} ms"] = milliseconds(lowered, on)
    return found


def over(row: Row, form: str, what: str = "ms") -> float | None:
    """How many times as fast as a form the last one that the device has is."""
    ours = forms(row["topology"])[-1]
    to, of = row.get(f"{form} {what}"), row.get(f"{ours} {what}")
    return float(to) / float(of) if to and of and form != ours else None


COLUMNS = {"written": "MXNet's default", "divided": "cuDNN"}
"""Of our forms, the baseline of the paper that computes like it."""


def table(rows: Sequence[Row]) -> Table:
    shown = Table("on", "part", "type", *FORMS, title="EcoRNN's word language model, one device")
    for name in (*(f"{form} / ours" for form in COLUMNS), "predicted"):
        shown.add_column(name, justify="right")
    said = {row["over"]: row["value"] for row in figures("EcoRNN")}
    theirs = (f"at most {said[baseline]} ({baseline})" for baseline in COLUMNS.values())
    shown.add_row("EcoRNN, on Maxwell and Pascal", "LSTMs", "float32", *[""] * len(FORMS), *theirs, "")
    for row in rows:
        times = (f"{float(ms):.2f} ms" if (ms := row.get(f"{form} ms")) else "" for form in FORMS)
        than = [(over(row, form), over(row, form, "predicted ms")) for form in COLUMNS]
        shown.add_row(
            *(row[of] for of in SETTINGS),
            *times,
            *("" if compiled is None else f"{compiled:.2f}" for compiled, _ in than),
            ", ".join(f"{predicted:.2f}" for _, predicted in than if predicted is not None),
        )
    return shown


DIFFERENCES = (
    "Machine: theirs is measured on GPUs of 2014 to 2017; ours is read from what is compiled for TPUs and an H100 that "
    "are not there, without what a kernel waits for memory, and for a V100 only predicted. Products in float32 are of "
    "bfloat16 on TPUs and of TF32 on an H100, by default.",
    "Over MXNet's default: that runs each operation of a cell as a kernel of its own, which EcoRNN fuses; XLA fuses "
    "them in the scan as it is written, and what is gained here is that weights stay on the chip of a TPU for all "
    "steps, and that products of inputs and gradients of weights are one product each.",
    "Over cuDNN: it takes products of all inputs and of gradients out of the loop, as the divided form does, and "
    "EcoRNN gains by the layout of states; here the loop that is left is one kernel, which reads weights once.",
    "On GPUs no kernel of ours keeps weights on the chip, so that the gain is that of dividing loops alone.",
    "A whole step gains less than its LSTMs: vocabulary, embedding and update of weights are as they were, and the "
    "model as it is written has products of inputs outside of the loop already.",
)
"""A sentence on each difference."""


def told(rows: Sequence[Row]) -> list[Table | str]:
    return [table(rows), *DIFFERENCES]


def verdict(rows: Sequence[Row]) -> str:
    """How much faster kernels are, beside what was published."""
    said = {row["over"]: row["value"] for row in figures("EcoRNN")}
    parts = []
    for part in PARTS:
        here = [row for row in rows if row["part"] == part and row.get("kernels ms")]
        than = {form: [q for row in here if (q := over(row, form)) is not None] for form in COLUMNS}
        if here:
            each = (f"{_span(found)} over {form}" for form, found in than.items())
            parts.append(f"{'LSTMs' if part == 'layers' else 'the whole step'} {' and '.join(each)}")
    theirs = " and ".join(f"{said[baseline]} over {baseline}" for baseline in COLUMNS.values())
    return f"times as fast by kernels on TPUs: {'; '.join(parts)} (EcoRNN, LSTMs on GPUs: at most {theirs})"


def _span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = arguments(__doc__, TOPOLOGIES, RESULTS)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    wanted = [
        dict(zip(SETTINGS, (on, part, dtype), strict=True))
        for part in options.parts.split(",")
        for on in options.on.split(",")
        for dtype in (("float32", "bfloat16") if part == "layers" else ("float32",))
    ]
    rows = Rows(options.out, SETTINGS, CODE)
    tabulate(rows, wanted, options.stale, measure, table, verdict)
    Console(width=150, highlight=False).print("\n".join(DIFFERENCES))


if __name__ == "__main__":
    main()
