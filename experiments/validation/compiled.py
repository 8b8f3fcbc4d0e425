"""Plans compiled for machines that are not there: what the tables about predictions are measured against.

    python -m experiments.validation.compiled                                 # every tuning program
    python -m experiments.validation.compiled --programs validation --plain   # every validation program; jax.jit beside
    python -m experiments.validation.compiled --corpus ranking --on h100:8 --plans all --random 8 --limit 240
    python -m experiments.validation.compiled --corpus together --models xdl,dlrm --on h100:4x8 --plans joint,sequential

Each plan is lowered and compiled by the real XLA:TPU or XLA:GPU compiler, in another process (a compiler may crash),
and kept in `build/CORPUS/MODEL/TOPOLOGY/PLAN/`, with what is known of its program. What is there already is not made
again. With `--again` every plan is made anew, and of their programs those are compiled that are not, byte for byte,
among the ones that were compiled before (`kept.py`). `agreement.py` and `collectives.py` read the corpus `compiled`,
`ranking.py` the corpus `ranking`, `experiments/tables/together.py` the corpus `together`. `collectives.py` reads the
scheduled HLO: use `--hlo`. With `--judge` nothing is planned or compiled: what is there is judged again, after a change
of the judge alone.

Programs are of two sets, and of one only. With the *tuning* programs the constants and passes of the cost model were
chosen: seven models at their published widths, with fewer layers, so that data parallelism fits on every machine. The
*validation* programs (`experiments/validation/programs/`) judge it. In the corpus of many plans tuning programs have
still fewer layers, because each plan takes the compiler up to minutes. Those of `together` are the whole models of
`experiments/tables/unity_table.py`, with as much of a batch for each device.

With `--plain` the user's own step under plain `jax.jit`, with the shardings of the plan for arguments and results, is
compiled too, into `build/plain/MODEL/TOPOLOGY/PLAN/`: what our program is compared with (`against_jit.py`).
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import dataclasses
import functools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

import models
from experiments.baselines import joint, ringed, sequential
from experiments.made_by import ROOT
from experiments.tables.unity_table import CASES, program_on
from experiments.validation.kept import compiled, judged_again
from experiments.validation.programs import VALIDATION, TrainStep
from unity_jax.aot.bundles import written
from unity_jax.aot.collectives import Collective, count_difference, stablehlo_collectives
from unity_jax.aot.duplicates import duplicates
from unity_jax.aot.flags import OFFLINE, WITHOUT_TRITON, Flags
from unity_jax.aot.topologies import topology
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan, make_plan
from unity_jax.plan.devices import mesh_over
from unity_jax.planning import rebuild
from unity_jax.program import Program, trace
from unity_jax.search.build import Builder
from unity_jax.search.candidate import NO_PINS, Candidate, best, finish
from unity_jax.search.experts import expert_seeds
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.sample import sample
from unity_jax.xla.traffic import Traffic

Facts = dict[str, Any]
FACTS = "facts.json"
BUILD = ROOT / "build"
TOPOLOGIES = ("v5e:2x4", "h100:8")
SIZES: dict[str, dict[str, Any]] = {
    "bert": {"layers": 2, "batch_size": 64},
    "gpt": {"layers": 4, "batch_size": 32},
    "mlp": {},
    "dlrm": {"rows": (250_000,) * 8, "bags": (4,) * 8},
    "resnext": {"stages": (1, 1, 1, 1)},
    "lstm_lm": {"batch_size": 160},
    "moe": {
        "scan": False,
        "layers": 2,
        "hidden": 1024,
        "heads": 8,
        "kv_heads": 2,
        "feed_forward": 3584,
        "length": 1024,
        "batch_size": 32,
    },
}
SHALLOW: dict[str, dict[str, Any]] = {
    **SIZES,
    "bert": {**SIZES["bert"], "layers": 1},
    "mlp": {"layers": 4},
    "dlrm": {"rows": (250_000,) * 4, "bags": (4,) * 4},
    "lstm_lm": {**SIZES["lstm_lm"], "layers": 1},
    "moe": {**SIZES["moe"], "layers": 1},
}
FOUR = ("chosen", "dp", "fsdp", "tp")
TWO = ("joint", "sequential")
PLAIN = ("chosen", "dp", "fsdp")
"""The plans whose shardings plain `jax.jit` is given."""
TUNING = tuple(SIZES)
SETS: dict[str, tuple[str, ...]] = {"tuning": TUNING, "validation": tuple(VALIDATION)}
"""The programs of each set."""


def named(sets: str) -> list[str]:
    """The programs of sets whose names are joined by commas."""
    return [model for name in sets.split(",") for model in SETS[name]]


def arguments(doc: str, out: Path) -> argparse.ArgumentParser:
    """The options of a script that reads what has been compiled; `out`: where its rows are."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(SETS), help="which sets")
    parser.add_argument("--models", help="of these sets; all by default")
    parser.add_argument("--on", default=",".join(TOPOLOGIES))
    parser.add_argument("--out", default=out, type=Path, metavar="CSV")
    return parser


def asked(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The programs and the topologies that a script is asked about."""
    return options.models.split(",") if options.models else named(options.programs), options.on.split(",")


def set_of(model: str) -> str:
    """Which set a program is of."""
    return next(name for name, members in SETS.items() if model in members)


@dataclass(frozen=True)
class Case:
    """One compiled plan: where it is, and what the compiler said."""

    model: str
    topology: str
    label: str
    folder: Path

    @property
    def facts(self) -> dict[str, Any]:
        """See `kept.compiled`; and `stablehlo`: see `stablehlo_facts`."""
        return json.loads((self.folder / FACTS).read_text())

    def plan(self, program: Program, machine: Machine) -> Plan:
        """The plan, priced by the machine as it is now."""
        saved = Plan.load(self.folder / "plan.json")
        return rebuild(program, saved, saved.mesh, machine, NO_PINS)


@dataclass(frozen=True)
class Corpus:
    """What has been compiled of models, in a folder of this name.

    **Fields:** `program`: the train step of a model on a topology; `untiled`: the models all of whose matmuls XLA:GPU
    gives to cuBLAS here. Untuned, it gives them to Triton, with tiles that do not fit all sides ("Couldn't find output
    tile sizes": 4192 of CANDLE, 6000 of the LSTM, 197 of ViT, 114 of T5).
    """

    name: str
    program: Callable[[str, str], Program]
    untiled: Collection[str]

    def folder(self, model: str, on: str) -> Path:
        return BUILD / self.name / model / on.replace(":", "_")

    def flags(self, model: str, platform: str) -> Flags:
        """With what a model is compiled."""
        return OFFLINE[platform] | (WITHOUT_TRITON if platform == "gpu" and model in self.untiled else {})

    def cases(self, names: list[str], on: list[str]) -> list[Case]:
        """What has been compiled, in order."""
        return [
            Case(model, topology_name, found.parent.name, found.parent)
            for model in sorted(names)
            for topology_name in sorted(on)
            for found in sorted(self.folder(model, topology_name).glob(f"*/{FACTS}"))
        ]


@functools.cache
def _validation(name: str) -> TrainStep:
    return VALIDATION[name]()  # once: functions that it makes are part of the structure of its state


def step_of(model: str, sizes: dict[str, dict[str, Any]] = SIZES) -> TrainStep:
    """A validation program, or a model of these sizes (fields of its Config)."""
    if model in VALIDATION:
        return _validation(model)
    made = models.get(model, **sizes[model])
    arguments = made.abstract_state(), made.abstract_batch()
    return TrainStep(
        made.train_step, arguments, lambda seed: (made.make_state(seed), made.make_batch(seed)), f"models/{model}.py"
    )


def of_sizes(sizes: dict[str, dict[str, Any]]) -> Callable[[str, str], Program]:
    """The programs of train steps, the same on every topology; each is traced once."""

    @functools.cache
    def program(model: str) -> Program:
        made = step_of(model, sizes)
        return trace(made.step, made.arguments, {}, donate_argnums=made.donate_argnums)

    return lambda model, _: program(model)


def of_unity(model: str, on: str) -> Program:
    return program_on(model, Machine.preset(on), CASES[model].batch)


COMPILED = Corpus("compiled", of_sizes(SIZES), ("clip_linen", "lstm_lm", "t5", "vit"))
JIT = Corpus("plain", COMPILED.program, COMPILED.untiled)
RANKING = Corpus("ranking", of_sizes(SHALLOW), ("lstm_lm",))
TOGETHER = Corpus("together", of_unity, tuple(CASES))
CORPORA = {corpus.name: corpus for corpus in (COMPILED, RANKING, TOGETHER)}


def made(machine: Machine, candidate: Candidate) -> Plan:
    mesh = jax.sharding.AbstractMesh(candidate.mesh.sizes, candidate.mesh.names)
    return make_plan(mesh, machine, machine.device.memory_bytes, candidate, NO_PINS)


def two(program: Program, machine: Machine) -> Iterator[tuple[str, Plan]]:
    """Rewrites and layouts chosen together, and one after the other."""
    together = joint(program, machine)
    yield "joint", made(machine, together)
    yield "sequential", made(machine, sequential(program, machine, known=together))


def plans(program: Program, machine: Machine, wanted: tuple[str, ...], randoms: int) -> Iterator[tuple[str, Plan]]:
    """The planner's choice, the experts on one and two axes, and random plans, each with a name for its folder.

    On two axes only experts that use them apart: the others are those of one axis. Experts have rings, as we do.
    """

    program, rules = implemented(program, machine, SearchOptions()), RuleCache()
    traffic = Traffic.of(program.graph, machine.device.compiler)
    meshes = mesh_candidates(machine.num_devices, machine)
    if "chosen" in wanted or "all" in wanted:
        yield "chosen", made(machine, joint(program, machine))
    for axes in meshes if "all" in wanted else meshes[:1]:
        resharder = Resharder(machine, axes)
        built = Builder(program.graph, program.ties, resharder, machine, rules, traffic).build(keep=False)
        for name, seed in expert_seeds(program, built, axes, rules).items():
            kind = name.split("(")[0]
            if len(axes.names) > 1 and " x " not in name:
                continue
            if "all" in wanted or kind in wanted:
                label = kind if len(axes.names) == 1 else f"{name} on {axes}"
                ways = (finish(program, built.decisions(seed, keep), resharder, rules, name) for keep in (True, False))
                limit = machine.device.memory_bytes  # gathered weights are kept, or not
                yield _file_name(label), made(machine, best([ringed([way], limit) for way in ways], limit))
    for i in range(randoms):
        axes = meshes[i % len(meshes)]
        decisions = sample(program.graph, program.ties, axes, rules, random.Random(i))
        found = finish(program, decisions, Resharder(machine, axes), rules, "random")
        yield f"random{i:02}", made(machine, found)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "=+-." else "_" for c in text)


def stablehlo_facts(plan: Plan, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """Where the lowered collectives differ from the planned ones; and which of them compute what another one does."""
    module, axes = lowered.compiler_ir("stablehlo"), MeshAxes.of(plan.mesh)
    planned = [Collective(c.kind, c.axes, c.bytes, c.count) for c in plan.predicted.collectives]
    return {
        "difference": count_difference(planned, stablehlo_collectives(module, axes)),
        "duplicates": [(c.kind, c.axes, c.bytes, c.count) for c in duplicates(module, axes)],
    }


def compile_into(
    folder: Path, lowered: jax.stages.Lowered, plan: Plan, compiling: Callable[[jax.stages.Lowered], Facts]
) -> Facts:
    """Compile a program that is made of a plan, and keep in a folder the plan and what is known of the program."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    (folder / FACTS).write_text(json.dumps({"error": "the compiler crashed, or took too long"}))  # if this process dies
    facts = compiling(lowered)
    (folder / FACTS).write_text(json.dumps(facts))
    return facts


def planned(plan: Plan, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """The program of a plan."""
    assert plan.stored is not None
    return lower(plan.stored, plan.pcg, mesh_over(plan, devices))


def plain(made: TrainStep, plan: Plan, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """The user's step under `jax.jit`, with the plan's shardings for arguments and results, and nothing else of it."""
    placed = dataclasses.replace(plan, mesh=mesh_over(plan, devices))
    shardings = {"in_shardings": placed.in_shardings, "out_shardings": placed.out_shardings}
    return jax.jit(made.step, donate_argnums=made.donate_argnums, **shardings).lower(*made.arguments)


def work(corpus: Corpus, name: str, on: str, wanted: tuple[str, ...], asked: argparse.Namespace) -> None:
    """Compile what is missing of one program on one topology."""
    program, machine, devices = corpus.program(name, on), Machine.preset(on), topology(on.replace("-cores", ""))
    options, both = corpus.flags(name, devices[0].platform), set(wanted) <= set(TWO)
    folders = [corpus] + [JIT] * asked.plain
    if asked.random == 0 and all((c.folder(name, on) / w / FACTS).exists() for c in folders for w in wanted):
        return
    compiling = functools.partial(
        compiled, devices=devices, topology=on, options=options, limit=asked.limit, hlo=asked.hlo
    )
    for label, plan in two(program, machine) if both else plans(program, machine, wanted, asked.random):
        makers = {corpus: functools.partial(planned, plan, devices)}
        if asked.plain and label in PLAIN:
            makers[JIT] = functools.partial(plain, step_of(name), plan, devices)
        for into, maker in makers.items():
            folder = into.folder(name, on) / label
            if (folder / FACTS).exists():
                continue
            facts = compile_into(folder, lowered := maker(), plan, compiling)
            if into is not JIT and "error" not in facts:
                facts["stablehlo"] = stablehlo_facts(plan, lowered)
                (folder / FACTS).write_text(json.dumps(facts))
            said = facts.get("error") or f"{facts['seconds']:.0f} s"
            print(f"{into.name} {name} {on} {label}: {said}", flush=True)


def judge_again(corpus: Corpus, name: str, on: str) -> None:
    """Take over what another judge says of the compiled programs of a model; plans and programs stay as they are."""
    for case in (*corpus.cases([name], [on]), *JIT.cases([name], [on])):
        facts = case.facts
        if "program" not in facts:
            continue
        try:
            (case.folder / FACTS).write_text(json.dumps(facts | judged_again(facts["program"])))
        except FileNotFoundError:
            print(f"{name} {on} {case.label}: its program was compiled elsewhere; make it with --again --hlo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="tuning", choices=SETS, help="which set")
    parser.add_argument("--models", help="of the set; all by default")
    parser.add_argument("--on", default=",".join(TOPOLOGIES))
    parser.add_argument("--plain", action="store_true", help="plain jax.jit with the same shardings as well")
    parser.add_argument("--plans", default=",".join(FOUR), help=f"of {', '.join(FOUR)}, or all; or {', '.join(TWO)}")
    parser.add_argument("--random", type=int, default=0, help="how many random plans of each")
    parser.add_argument("--again", action="store_true", help="make every plan anew; compile what that changed")
    parser.add_argument("--corpus", default="compiled", choices=CORPORA)
    parser.add_argument("--limit", type=int, default=0, help="seconds that the compiler may take for a plan")
    parser.add_argument("--hlo", action="store_true", help="compile what is known as well, if its HLO is not here")
    parser.add_argument("--judge", action="store_true", help="only judge again what has been compiled")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.models.split(",") if options.models else SETS[options.programs]
    jobs = [(name, on) for name in names for on in options.on.split(",")]
    if options.worker:
        wanted = tuple(options.plans.split(","))
        with written():
            return work(CORPORA[options.corpus], *jobs[0], wanted, options)
    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        for name, on in progress.track(jobs, description="compiling"):
            if options.judge:
                judge_again(CORPORA[options.corpus], name, on)
                continue
            if options.again:
                for corpus in (CORPORA[options.corpus], JIT):
                    shutil.rmtree(corpus.folder(name, on), ignore_errors=True)
            same = [*sys.argv[1:], "--models", name, "--on", on, "--worker"]
            command = [sys.executable, "-m", "experiments.validation.compiled", *same]
            while (code := subprocess.run(command).returncode) < 0:
                progress.console.print(
                    f"{name} on {on}: the compiler was ended (signal {-code}); going on with the next plan"
                )
            if code:
                sys.exit(code)
    return None


if __name__ == "__main__":
    main()
