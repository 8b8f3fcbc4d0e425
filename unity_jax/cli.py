"""The command line: `unity plan`, `unity explain`, `unity verify`, `unity sweep`, `unity calibrate`, `unity rules
check`, `unity rules generate`, `unity kernels tune` (also `python -m unity_jax ...`).

    unity plan train.py:make_step --machine v5e:4x4 --out plan.json
    unity sweep train.py:make_step --machine v5e --devices 8,16,32
    unity sweep train.py:make_step --machine h100 --devices 8 --memory-limit 20GiB,40GiB,80GiB
    unity verify models:step bert tiny --topology v5e:2x4
    unity rules check rules.json

A function to plan is named by a factory: `module:name` or `path/to/file.py:name`, called with the words that follow it,
as strings. It returns the train step, plain or decorated with `auto_shard`, and a tuple of its arguments, arrays or
`jax.ShapeDtypeStruct`s.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.progress import track

from unity_jax.aot import tune
from unity_jax.aot.bundles import written
from unity_jax.aot.topologies import topology
from unity_jax.api import AutoSharded, auto_shard
from unity_jax.calibration import calibrate
from unity_jax.errors import UnityError
from unity_jax.machine.family import machine_of
from unity_jax.machine.machine import Machine
from unity_jax.plan import Plan
from unity_jax.plan.table import sweep
from unity_jax.rules import generate
from unity_jax.rules.check import check
from unity_jax.text import size_of


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, or 1 for a plan that does not hold, and exits with 2 for a wrong
    argument."""
    parser = _parser()
    options = parser.parse_args(arguments)
    used: _Parser = options.parser
    try:
        return options.run(options)
    except _Wrong as error:
        used.error(str(error))
    except UnityError as error:
        used.error(" ".join(str(error).split()))


class _Wrong(Exception):
    """What is wrong with an argument, by name."""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="unity", description="Plan how a JAX train step runs on many devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(run=run, parser=made)
        return made

    planning = command("plan", _plan, "search for the best plan and print it")
    explaining = command("explain", _explain, "say why arguments and operations are laid out as they are")
    verifying = command("verify", _verify, "compile for a TPU or GPU topology, and compare with what was predicted")
    sweeping = command("sweep", _sweep, "plan for several numbers of devices or memory limits, and compare")
    measuring = command("calibrate", _calibrate, "measure the devices at hand, for plans that know them")

    for made in (planning, explaining, verifying, sweeping):
        made.add_argument("target", metavar="FACTORY", help="module:name or path/to/file.py:name")
        what = "passed to the factory" + ("; {devices} in it becomes their number" if made is sweeping else "")
        made.add_argument("words", metavar="WORD", nargs="*", help=what)
        read, metavar = (_limits, "BYTES,BYTES,...") if made is sweeping else (_bytes, "BYTES")
        made.add_argument("--memory-limit", type=read, metavar=metavar, help="per device, as 16e9 or 14.5GiB")
    for made in (planning, explaining, verifying):
        known = "default: the topology" if made is verifying else "default: the devices of this process"
        made.add_argument("--machine", type=_machine, help=f"v5e:2x4, h100:2x8, cpu:8, or a machine file; {known}")
    for made in (explaining, verifying):
        made.add_argument("--plan", type=_saved, metavar="FILE", help="a plan to use, as `unity plan --out` writes")
    planning.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON")
    text = "compile it for the machine, and plan again if its program needs more memory than the limit"
    planning.add_argument("--verify", action="store_true", help=text)
    planning.add_argument("--memory", action="store_true", help="print what is in memory, by kind and by line")
    explaining.add_argument("--at", default="*", metavar="PATTERN", help="part of a path, a scope or file:line")
    verifying.add_argument("--topology", required=True, help="v5e:2x4, v5p:2x2x2, h100:8, ...")
    sweeping.add_argument("--machine", required=True, help="v5e, v5p, h100, ..., or a machine file")
    sweeping.add_argument("--devices", required=True, type=_counts, metavar="N,N,...", help="how many of them")
    measuring.add_argument("--out", type=Path, required=True, metavar="FILE", help="write the machine as JSON")
    _rules(commands.add_parser("rules", help="work with rewrite rules", description="Work with rewrite rules."))
    _kernels(commands.add_parser("kernels", help="work with kernels", description="Work with kernels."))
    return parser


def _rules(rules: argparse.ArgumentParser) -> None:
    commands = rules.add_subparsers(required=True, metavar="COMMAND")
    text = "prove each rule of a file, or say why not"
    checking = commands.add_parser("check", help=text, description=text[0].upper() + text[1:] + ".")
    checking.add_argument("file", type=Path, metavar="FILE", help="rules as JSON, in the project's form or FlexFlow's")
    checking.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    checking.set_defaults(run=lambda options: check(options.file, options.json), parser=checking)
    text = "find and prove the rules of the library (some minutes)"
    making = commands.add_parser("generate", help=text, description=text[0].upper() + text[1:] + ".")
    making.add_argument("--out", type=Path, metavar="FILE", help="write the rules as JSON")
    making.add_argument("--check", action="store_true", help="fail if they are not those that ship")
    making.set_defaults(run=lambda options: generate.run(options.out, options.check), parser=making)


def _kernels(kernels: argparse.ArgumentParser) -> None:
    commands = kernels.add_subparsers(required=True, metavar="COMMAND")
    text = "find the best blocks of kernels for TPUs by the compiler's own schedules (half an hour)"
    tuning = commands.add_parser("tune", help=text, description=text[0].upper() + text[1:] + ".")
    tuning.add_argument("--on", default="v5e:2x4,v5p:2x2x2,v6e:2x4", metavar="TOPOLOGY,...", help="%(default)s")
    tuning.add_argument("--out", type=Path, metavar="FILE", help="write the table as CSV")
    tuning.add_argument("--check", action="store_true", help="fail if it is not the one that ships")
    tuning.set_defaults(run=_tune, parser=tuning)


def _tune(options: argparse.Namespace) -> int:
    _on_cpu()
    shown = functools.partial(track, description="compiling", console=Console(stderr=True), transient=True)
    try:
        text = tune.as_text(tune.tuned(options.on.split(","), shown))
    except (ImportError, ValueError) as error:
        raise _Wrong(f"argument --on: {error}") from None
    print(text, end="")
    if options.out is not None:
        _writable("--out", options.out, functools.partial(_write, text=text))
    return int(options.check and text != tune.TUNED.read_text())


def _plan(options: argparse.Namespace) -> int:
    step, args = _target(options, options.machine, options.words)
    if options.verify:
        given = step._given["options"]
        step = auto_shard(step, options=replace(given, compile_candidates=max(given.compile_candidates, 1)))
    with written() if options.verify else contextlib.nullcontext():
        plan = step.plan(*args)
    print(plan, end="")
    if options.memory:
        print(f"\n{plan.memory()}", end="")
    if options.out:
        _writable("--out", options.out, plan.save)
    return 0 if plan.fits else 1


def _explain(options: argparse.Namespace) -> int:
    step, args = _target(options, options.machine, options.words)
    plan = step.plan(*args)
    try:
        print(plan.explain(options.at), end="")
    except ValueError as error:
        raise _Wrong(f"argument --at: {error}") from None
    return 0


@written()
def _verify(options: argparse.Namespace) -> int:
    _on_cpu()
    try:
        devices = topology(options.topology)
    except (ImportError, ValueError) as error:
        raise _Wrong(f"argument --topology: {error}") from None
    step, args = _target(options, options.machine or Machine.detect(devices), options.words)
    plan = step.plan(*args)
    if plan.axes.num_devices != len(devices):
        raise _Wrong(
            f"argument --topology: {options.topology} has {len(devices)} devices, the plan is for "
            f"{plan.axes.num_devices}: name one of that many"
        )
    found = plan.verify(options.topology)
    print(found, end="")
    return 0 if found.ok else 1


def _sweep(options: argparse.Namespace) -> int:
    try:
        machines = [machine_of(options.machine, n) for n in options.devices]
    except ValueError as error:
        raise _Wrong(f"argument --machine or --devices: {error}") from None
    plans, grows = [], any("{devices}" in word for word in options.words)
    every = list(itertools.product(machines, options.memory_limit or [None]))
    for machine, options.memory_limit in track(every, "planning", console=Console(stderr=True), transient=True):
        words = [word.replace("{devices}", str(machine.num_devices)) for word in options.words]
        step, args = _target(options, machine, words)
        plans.append(step.plan(*args))
    print(sweep(plans, grows), end="")
    return 0 if all(plan.fits for plan in plans) else 1


def _calibrate(options: argparse.Namespace) -> int:
    errors = Console(stderr=True)
    found = calibrate(track=functools.partial(track, description="measuring", console=errors, transient=True))
    print(found, end="")
    _writable("--out", options.out, found.machine.save)
    return 0


def _target(
    options: argparse.Namespace, machine: Machine | None, words: Sequence[str]
) -> tuple[AutoSharded, tuple[Any, ...]]:
    """The step of the factory, with the machine and memory limit of the command line, and its arguments."""
    plan = getattr(options, "plan", None)
    if machine is not None or plan is not None:
        _on_cpu()
    factory = _factory(options.target)
    try:
        inspect.signature(factory).bind(*words)
    except TypeError as error:
        raise _Wrong(f"argument WORD: {options.target} takes other words: {error}") from None
    try:
        made = factory(*words)
    except ValueError as error:
        if not words:
            raise
        raise _Wrong(f"argument WORD: {error}") from None
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise _Wrong(f"argument FACTORY: {options.target} returned {type(made).__name__}, not (train_step, args)")
    step, args = made
    return auto_shard(step, machine=machine, memory_limit=options.memory_limit, plan=plan), tuple(args)


def _on_cpu() -> None:
    """Planning for a machine that is not there needs none: do not look for accelerators, unless the user says so."""
    config: Any = jax.config  # its settings are added while JAX is imported
    if config.jax_platforms is None:
        config.update("jax_platforms", "cpu")


def _factory(target: str) -> Callable[..., Any]:
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise _Wrong(f"argument FACTORY: {target!r} is not module:name or path/to/file.py:name")
    try:
        module = _script(Path(where)) if where.endswith(".py") else _module(where)
    except ModuleNotFoundError as error:
        raise _Wrong(f"argument FACTORY: cannot import {where!r}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise _Wrong(f"argument FACTORY: {where} has no function {name!r}")
    return found


def _module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    return importlib.import_module(name)


def _script(path: Path) -> ModuleType:
    if not path.is_file():
        raise _Wrong(f"argument FACTORY: there is no file {str(path)!r}")
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _machine(text: str) -> Machine:
    try:
        return Machine.load(text) if text.endswith(".json") else Machine.preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _saved(path: str) -> Plan:
    try:
        return Plan.load(path)
    except UnityError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> list[int]:
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers of devices, as 8,16,32")
    return found


def _bytes(text: str) -> float:
    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limits(text: str) -> list[float]:
    return [_bytes(word) for word in text.split(",")]


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _writable(argument: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise _Wrong(f"argument {argument}: {error}") from None
    print(f"written to {path}")
