"""How long the kernels take for which XLA:TPU writes no estimate: the length of their schedules.

It estimates no cycles for gathers, scatters and sorts, but schedules them like all others: in bundles, of which one
starts in a cycle. What libtpu writes of a kernel when it is asked to (`written`) has the loops over its rows:

    0x25 LB: >> { ... } /* Start region 382 */
    0x43c   : >> { %p48_p9 = scmp.ge.s32.totalorder %s51_s10, 16 /* loop exit test */ }
    0x43d   : > { %50 = sbr.rel (!%p48_p9) target = $region382 }

Not in there is what a kernel waits for memory: a schedule is the least that it takes.

    with written():  # libtpu is loaded in here
        empty()
        module = parse(jax.jit(step).lower(*shapes).compile().as_text())
        estimated_cycles(with_schedules(module, schedules(module))).missing
    # 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from unity_jax.aot.cycles import computes
from unity_jax.aot.flags import SCHEDULES_WRITTEN, as_text
from unity_jax.aot.hlo import Instruction, Module

_FILE = re.compile(r"\d+-(?P<name>.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r" *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})? *: *>* *\{")
_EMPTY = re.compile(r" *(?:0x)?[0-9a-f]+ +: *>* *\{\}")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BACK = re.compile(r"sbr\.rel \(!%(\w+)\) target = \$region(\d+)")
_DELAY = 4
"""Bundles after a branch that run before it is taken."""


_VARIABLE = "LIBTPU_INIT_ARGS"
_FLAGS = as_text(SCHEDULES_WRITTEN)


@contextlib.contextmanager
def written() -> Iterator[None]:
    """What is compiled in here for TPUs has its schedules written, if libtpu was not loaded before."""
    before = os.environ.get(_VARIABLE, "")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_VARIABLE] = f"{before} {_FLAGS}{folder}"
        try:
            yield
        finally:
            os.environ[_VARIABLE] = before


def _files() -> list[Path]:
    """The schedules that are written."""
    _, asked, folder = os.environ.get(_VARIABLE, "").partition(_FLAGS)
    return sorted(path for path in Path(folder).iterdir() if _FILE.fullmatch(path.name)) if asked else []


def empty() -> None:
    """Forget the schedules of what has been compiled: kernels of two programs may have the same names."""
    for path in _files():
        path.unlink()


def scheduled_cycles(text: str, trips: Sequence[float] = ()) -> int:
    """The bundles of one kernel, those of loops as often as they run.

    **Arguments:** `trips`: how often loops run where a value decides that, from the first one to the last; others once.
    """
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line  # a bundle may have several lines
    begins = {region: i for i, bundle in enumerate(bundles) for region in _REGION.findall(bundle)}
    times, unknown = [1.0] * len(bundles), iter(trips)
    for i, bundle in enumerate(bundles):
        for more, region in _BACK.findall(bundle):
            begin = begins.get(region, i + 1)
            test = re.search(rf"%{more} = scmp\.\w+\.s32\.totalorder [^,;]*, (\d+)", text)
            if begin > i:
                continue
            count = int(test[1]) if test else next(unknown, 1.0)
            after = bundles[i + 1 : i + 1 + _DELAY]
            end = i + 1 + next((n for n, b in enumerate(after) if not _EMPTY.match(b)), len(after))
            times[begin:end] = (n * count for n in times[begin:end])
    return round(sum(times))


def schedules(module: Module, trips: Sequence[float] = ()) -> dict[str, int]:
    """Cycles by name of the instructions that compute and have no estimate, of the module that was compiled last.

    Equal kernels are compiled once. Outside of `written` there are none. `trips` as of `scheduled_cycles`.
    """
    of = {m["name"]: path for path in _files() if (m := _FILE.fullmatch(path.name))}

    @functools.cache
    def cycles(name: str) -> int:
        return scheduled_cycles(of[name].read_text(), trips)

    run = _run(module)
    wanted = [
        (op, _form(op, computation, module))
        for name, computation in module.computations.items()
        if name in run
        for op in computation.values()
        if op.cycles is None and computes(op, module)
    ]
    names = {op.name: op.name.removeprefix("%") for op, _ in wanted}
    equal = {form: names[op.name] for op, form in wanted if names[op.name] in of}
    return {op.name: cycles(equal[form]) for op, form in wanted if form in equal}


def with_schedules(module: Module, cycles: Mapping[str, int]) -> Module:
    """The module with the cycles of `schedules` as those of these instructions."""
    return dataclasses.replace(
        module,
        computations={
            name: {
                op.name: dataclasses.replace(op, scheduled=cycles[op.name]) if op.name in cycles else op
                for op in computation.values()
            }
            for name, computation in module.computations.items()
        },
    )


def _run(module: Module) -> set[str]:
    """The computations whose instructions are kernels: the entry, and what loops, branches and calls run."""
    found, stack = {module.entry}, [module.entry]
    while stack:
        for op in module.computations[stack.pop()].values():
            inside = set(op.called) & set(module.computations) if op.opcode in ("while", "conditional", "call") else ()
            stack += [name for name in inside if name not in found]
            found.update(inside)
    return found


Form = tuple[object, ...]


def _form(op: Instruction, computation: Mapping[str, Instruction], module: Module) -> Form:
    """What equal instructions have in common: everything but names and where they come from."""
    types = tuple(computation[name].type for name in op.operands if name in computation)
    return op.opcode, op.type, types, _plain(op.attributes), tuple(_forms(op, module))


def _forms(op: Instruction, module: Module) -> Iterator[Form]:
    for name in op.called:
        inside = module.computations.get(name, {})
        at = {inner: i for i, inner in enumerate(inside)}
        for i in inside.values():
            read = tuple(at.get(operand, -1) for operand in i.operands) or i.arguments
            yield i.opcode, i.type, read, _plain(i.attributes), tuple(_forms(i, module))


def _plain(attributes: str) -> str:
    kept = attributes.partition("backend_config=")[0]
    return re.sub(r"metadata=\{[^}]*\}|%[\w.\-]+", "", kept)
