"""What the compilers made of programs, kept by the text of the program: none is compiled twice, on any machine.

    facts = compiled(lowered, "h100:8", options)
    facts["bytes"], facts["judged"]     # of a device; seconds of a step, as judged

`experiments/results/programs.csv` has a row for each program that a compiler compiled or refused. What it says holds
for the same text, compiler and options, whatever changes in the library: after a change only those programs are
compiled that it changed. A judge that says something else makes rows stale: they name what it says of small programs
that were compiled once (`samples/`), not its code. Stale ones are judged again from the scheduled HLO, which is in
`build/programs/` where the program was compiled, or from the program compiled again.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.made_by import ROOT
from experiments.rows import Row, Rows
from experiments.validation.judge import judge
from unity_jax.aot.allocated import allocated
from unity_jax.aot.bundles import empty, schedules, with_schedules
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import Module, parse

jax.config.update("jax_traceback_in_locations_limit", 0)  # kernels would name files and lines of this checkout

STORE = ROOT / "build" / "programs"
SAMPLES = ROOT / "experiments" / "validation" / "samples"
HLO, WRITTEN = "hlo.txt.gz", "written.json"


def judged_as(row: Mapping[str, Any]) -> str:
    """The judge of a row's topology: twelve hexadecimal digits of all that it says of the samples of that device."""
    return _judge_of(str(row["topology"]).split(":")[0].removesuffix("-cores"))


@functools.cache
def _judge_of(device: str) -> str:
    says = list[Any]()
    for path in sorted(SAMPLES.glob("*.json.gz")):
        sample = json.loads(gzip.decompress(path.read_bytes()))
        if sample["topology"].split(":")[0] == device:
            module = with_schedules(parse(sample["hlo"]), sample["schedules"])
            figures = _judged(module, sample["topology"]).items()
            says.append((path.name, [f"{name} {figure:.6g}" for name, figure in figures if figure != ""]))
    if not says:
        raise ValueError(f"{SAMPLES} has no program of {device!r} that tells one judge from another")
    return hashlib.sha256(repr(says).encode()).hexdigest()[:12]


KEPT = Rows(ROOT / "experiments" / "results" / "programs.csv", ("program",), judged_as)


def compiled(
    lowered: jax.stages.Lowered,
    devices: list[jax.Device],
    topology: str,
    options: Mapping[str, Any],
    limit: int = 0,
    hlo: bool = False,
) -> dict[str, Any]:
    """What the compiler makes of a program for devices of a topology: now, if it is not known.

    A program that takes the compiler more than `limit` seconds (0: none) ends the process, as one that crashes it does.

    **Arguments:** `options`: the compiler's; `hlo`: the compiled program is wanted as well, for `module_of`.

    **Returns:** `program`: its name in the table; `bytes` that it takes of a device's memory; the `judged` seconds of a
    step; of XLA:TPU the `cycles` that it estimates, and of how many instructions it estimates none (`missing`); the
    `seconds` that compiling took. Or `error`: why it was refused.
    """
    compiler = f"jax {jax.__version__}, {devices[0].client.platform_version.splitlines()[-1]}"
    what = (compiler, topology, sorted(options.items()), lowered.as_text())
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:24]
    row, here = KEPT.get({"program": name}), (STORE / name / WRITTEN).exists()
    if row is None or (not here if hlo else not row["error"] and KEPT.is_stale(row)):
        if not here:
            _compile(STORE / name, lowered, options, devices[0].platform, limit)
        row = _kept(name, compiler, topology)
    return _facts(row)


def judged_again(name: str) -> dict[str, Any]:
    """What is known of a program, by the judge as it is. Raises `FileNotFoundError` where another one judged it, if it
    was compiled elsewhere."""
    row = KEPT.get({"program": name})
    assert row is not None
    if KEPT.is_stale(row) and not row["error"]:
        row = _kept(name, row["compiler"], row["topology"])
    return _facts(row)


def module_of(name: str) -> Module:
    """The compiled program of this name. Raises `FileNotFoundError` if it was compiled elsewhere."""
    text = gzip.decompress((STORE / name / HLO).read_bytes()).decode()
    return with_schedules(parse(text), json.loads((STORE / name / WRITTEN).read_text())["schedules"])


def _compile(
    folder: Path, lowered: jax.stages.Lowered, options: Mapping[str, Any], platform: str, limit: int
) -> None:
    """Compile a program and keep what the compiler says."""
    start = time.monotonic()
    facts: dict[str, Any] = {"bytes": "", "error": "", "schedules": None}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        empty()
        signal.alarm(limit)
        made, used = allocated(lowered, options, platform)
        signal.alarm(0)
        text = made.as_text()
        facts |= {"bytes": used, "schedules": schedules(parse(text))}
        (folder / HLO).write_bytes(gzip.compress(text.encode(), 5))
    except jax.errors.JaxRuntimeError as error:
        facts["error"] = str(error).splitlines()[0]
    facts["seconds"] = time.monotonic() - start
    (folder / WRITTEN).write_text(json.dumps(facts))


def _kept(name: str, compiler: str, topology: str) -> Row:
    """The row of a program that was compiled here, by the judge as it is."""
    facts = json.loads((STORE / name / WRITTEN).read_text())
    facts |= _judged(module_of(name), topology) if facts.pop("schedules") is not None else {}
    return KEPT.put({"program": name, "compiler": compiler, "topology": topology}, facts)


def _judged(module: Module, topology: str) -> dict[str, Any]:
    found: dict[str, Any] = {"judged": judge(module, topology), "cycles": "", "missing": ""}
    if topology.split(":")[0].removesuffix("-cores") in CLOCKS:
        cycles = estimated_cycles(module)
        found |= {"cycles": cycles.total, "missing": cycles.missing}
    return found


def _facts(row: Row) -> dict[str, Any]:
    if row["error"]:
        return {"program": row["program"], "error": row["error"]}
    numbers = {"bytes": int, "judged": float, "cycles": int, "missing": int, "seconds": float}
    return {"program": row["program"]} | {name: of(row[name]) for name, of in numbers.items() if row[name]}
