"""One thing that `on_gpu.py` measures, in a process of its own: the peak of memory is that of a whole process.

    python -m experiments.validation.one_step '{"way": "plan", "model": "gpt", "size": "tiny", ...}'

Ways: `calibrate` the device, run the `plan` of a step, run the step under `plain` `jax.jit`, or only `predict` it.
What is found is written to standard output as soon as it is known, a line of JSON each, so that a process that is
stopped loses nothing that it had. Planning needs no device: several processes plan while one has the device to itself,
from compilation on, since that tries kernels.
"""

from __future__ import annotations

import ast
import fcntl
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import jax

import models
import unity_jax as unity
from unity_jax.calibration import calibrate, structure
from unity_jax.calibration.fit import predicted
from unity_jax.calibration.measure import Sample, effort
from unity_jax.calibration.overlap import Overlap
from unity_jax.machine.machine import Machine
from unity_jax.machine.presets import CHIPS
from unity_jax.planning import alone
from unity_jax.search import chunking, recomputing, saving

LEAST, WANTED, MOST = 0.6, 0.7, 0.8
"""Of the memory of a device, what the predicted peak of a step that fills it may be, and where the next try aims."""

TRIES = 4
WARM_UP, FEWEST, STEPS, SECONDS = 2, 3, 20, 4.0
"""Steps that do not count; how many are timed at least and at most, and for how long."""

AS_WRITTEN = unity.Options(cache=None, checkpoint="keep")
"""What is measured is the step that plain `jax.jit` runs."""

Task = Mapping[str, Any]


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


# Calibration


def calibrated(task: Task) -> None:
    """Measure the device, unless its profile is there from before; each sample is said with what the preset expects."""
    device = jax.devices()[0]
    path = Path(task["folder"]) / f"{device.device_kind.replace(' ', '-')}-1.json"
    say(on=device.device_kind, profile=str(path))
    if path.exists():
        return
    known = structure([device])
    wanted = effort(device.platform)
    if task["small"]:
        wanted = replace(wanted, dtypes=("float32",), matmuls=((64, 64), (16, 128)), streams=(2**16,), repeats=2)
        wanted = replace(wanted, overlap=1e-3)

    def keep(found: Sample | Overlap) -> None:
        if isinstance(found, Overlap):
            apart = dict(zip(("first", "second"), found.alone, strict=True))
            say(what=" and ".join(found.streams), seconds=found.together, **apart)
        else:
            rows = round(found.flops / 2 / found.width**2) if found.width else 0
            shape = f"{found.about}[{rows},{found.width}] @ [{found.width},{found.width}]" if rows else found.about
            rates = {"flops per second": found.flops / found.seconds, "bytes per second": found.nbytes / found.seconds}
            rates = {name: rate for name, rate in rates.items() if rate}
            expected = predicted(found, known) if known.device.memory_bandwidth > 1 else ""  # 1: of no known kind
            say(what=found.kind, of=shape, bytes=found.nbytes, seconds=found.seconds, expected=expected, **rates)

    calibrate([device], wanted, keep=keep).machine.save(path)


# A step


def filled(task: Task, machine: Machine, memory: float) -> tuple[models.Model, unity.Plan, Any]:
    """A model with as large a batch as makes the predicted peak fill the memory, its plan, and the step that runs it.

    What the state and its gradients take does not grow with the batch; the rest is taken for linear.
    """
    batch, tried = task["batch"], set()
    for _ in range(TRIES):
        model, plan, step = made(task, machine, batch, memory)
        tried.add(batch)
        peak, fixed = plan.predicted.peak_bytes, _bytes(model.abstract_state()) + _bytes(model.abstract_state().params)
        grows = max(peak - fixed, peak / 20)
        batch = _rounded(batch * (WANTED * memory - fixed) / grows)
        if LEAST <= peak / memory <= MOST or batch in tried:
            break
    if not plan.fits:
        raise ValueError(f"no batch fits: a batch of {model.config.batch_size} needs {peak / 2**30:.1f} GiB")
    return model, plan, step


def made(task: Task, machine: Machine, batch: int, memory: float) -> tuple[models.Model, unity.Plan, Any]:
    """A model with a batch, its plan under a limit of memory, and the step that runs it."""
    model = models.get(task["model"], task["size"], **task["changes"], batch_size=batch)
    step = unity.auto_shard(
        model.train_step,
        donate_argnums=0,
        machine=machine,
        mesh=jax.devices()[:1],
        memory_limit=memory,
        options=AS_WRITTEN,
    )
    with alone():
        return model, step.plan(model.abstract_state(), model.abstract_batch()), step


def limited(task: Task, machine: Machine) -> tuple[models.Model, unity.Plan, Any]:
    """A model whose memory is limited to a part of what it needs, in one way of saving memory or by any."""
    for way, off in ALONE.items():
        for module, name, nothing in off if task["by"] not in ("any", way) else ():
            setattr(module, name, lambda *_, nothing=nothing: nothing)
    model, plan, step = made(task, machine, task["batch"], task["limit"])
    say(saving="; ".join(map(str, plan.saving)), fits=plan.fits)
    if not plan.fits:
        raise ValueError(f"no plan fits: {plan.predicted.peak_bytes / 2**30:.1f} GiB")
    return model, plan, step


ALONE: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    "chunks": [(chunking, "_chunked", ())],
    "microbatches": [(saving, "_batch", None)],
    "recomputation": [(saving, "recomputable", ())],
    "host": [*((saving, name, ()) for name in ("hostable", "stacks", "spillable")), (recomputing, "spillable", ())],
}
"""What the search calls for each way of saving memory (`search.saving`), and what that finds if there is nothing."""


def _rounded(batch: float) -> int:
    """At least 1, and of few significant bits."""
    unit = 2 ** max(0, math.floor(math.log2(max(batch, 1))) - 3)
    return max(1, int(batch / unit) * unit)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def planned(task: Task) -> None:
    device = jax.devices()[0]
    profile = Path(task["profile"])
    try:
        machine = Machine.detect([device])
    except ValueError:  # no preset: what has been measured is all that is known
        machine = _profile(task)
        if machine is None:
            raise
    limit = (device.memory_stats() or {}).get("bytes_limit") or machine.device.memory_bytes
    memory = task["part"] * (task["memory"] or min(limit, machine.device.memory_bytes))
    model, plan, step = limited(task, machine) if "limit" in task else filled(task, machine, memory)
    say(
        batch=model.config.batch_size,
        parameters=model.num_parameters,
        memory=memory,
        rewrites=len(plan.rewrites),
        **{"predicted seconds": plan.predicted.step_seconds, "predicted bytes": plan.predicted.peak_bytes},
    )
    shapes = model.abstract_state(), model.abstract_batch()
    if (measured := _profile(task)) is not None:
        again = unity.auto_shard(model.train_step, donate_argnums=0, machine=measured, plan=plan)
        found = again.plan(*shapes).predicted
        say(**{"calibrated seconds": found.step_seconds, "calibrated bytes": found.peak_bytes, "profile": profile.name})
    constants = (plan.bound().constants,) if plan.bound().constants else ()
    batch = model.make_batch(0)
    run(
        task,
        "plan",
        step.lower(*shapes),
        lambda: step.init(model.make_state, jax.random.key(0)),
        lambda: (*constants, step.shard(batch)),
    )


def _profile(task: Task) -> Machine | None:
    """The calibrated machine, once calibration has ended; None if it failed."""
    while not Path(task["ready"]).exists():
        time.sleep(0.1)
    return Machine.load(task["profile"]) if Path(task["profile"]).exists() else None


def predict(task: Task) -> None:
    """By the preset of the kind of device that a row is about, and by the profile that was measured of it, if there."""
    chip = next(name for name, chip in CHIPS.items() if re.fullmatch(chip.kind, task["on"].lower()))
    changes = {name: ast.literal_eval(value) for name, value in task["changes"].items()}
    model = models.get(task["model"], task["size"], **changes, batch_size=int(task["batch"]))
    shapes = model.abstract_state(), model.abstract_batch()
    profile = Path(task["folder"]) / task["profile"]
    machines = {"predicted": Machine.preset(f"{chip}:1")}
    if task["profile"] and profile.exists():
        machines["calibrated"] = Machine.load(profile)
    for name, machine in machines.items():
        found = unity.auto_shard(model.train_step, donate_argnums=0, machine=machine, options=AS_WRITTEN).plan(*shapes)
        say(**{f"{name} seconds": found.predicted.step_seconds, f"{name} bytes": found.predicted.peak_bytes})


def plain(task: Task) -> None:
    model = models.get(task["model"], task["size"], **task["changes"], batch_size=task["batch"])
    lowered = jax.jit(model.train_step, donate_argnums=0).lower(model.abstract_state(), model.abstract_batch())
    batch = model.make_batch(0)
    on = jax.devices()[0]
    make = jax.jit(model.make_state)
    run(task, "plain", lowered, lambda: make(jax.random.key(0)), lambda: (jax.device_put(batch, on),))


def run(
    task: Task,
    way: str,
    lowered: jax.stages.Lowered,
    make_state: Callable[[], Any],
    make_rest: Callable[[], tuple[Any, ...]],
) -> None:
    """Compile and time a step that has the device to itself.

    **Arguments:** `make_rest`: the captured arrays before the state, if there are any, and the batch after it.
    """
    device = jax.devices()[0]
    take(Path(task["lock"]))
    say(holds=True)
    start = time.perf_counter()
    compiled = lowered.compile()
    taken = time.perf_counter() - start
    m = compiled.memory_analysis()
    memory = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    say(**{f"{way} compile seconds": taken, f"{way} compiled bytes": memory})
    *constants, batch = make_rest()
    state = jax.block_until_ready(make_state())
    say(**{f"{way} peak before": (device.memory_stats() or {}).get("peak_bytes_in_use", "")})
    state, metrics = jax.block_until_ready(compiled(*constants, state, batch))
    say(**{f"{way} loss": float(metrics["loss"])})
    times: list[float] = []
    while len(times) < FEWEST + WARM_UP or (len(times) < STEPS and sum(times) < SECONDS):
        begin = time.perf_counter()
        state, metrics = compiled(*constants, state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - begin)
    counted = times[WARM_UP:]
    low, middle, high = min(counted), statistics.median(counted), max(counted)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", "")
    say(**{f"{way} seconds": middle, f"{way} fastest": low, f"{way} slowest": high, f"{way} peak bytes": peak})
    say(held=time.perf_counter() - start)


def take(path: Path) -> None:
    """Wait for the device, and keep it until this process ends, which gives back all of its memory."""
    HELD.append(path.open("a"))
    fcntl.flock(HELD[-1], fcntl.LOCK_EX)


HELD: list[IO[str]] = []
WAYS: dict[str, Callable[[Task], None]] = {
    "calibrate": calibrated,
    "plan": planned,
    "plain": plain,
    "predict": predict,
}


def main() -> None:
    task = json.loads(sys.argv[1])
    WAYS[task["way"]](task)


if __name__ == "__main__":
    main()
