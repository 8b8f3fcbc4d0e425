"""The target of a rule as a program, for what a match has found."""

from __future__ import annotations

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.rewrite.bind import Match
from unity_jax.rewrite.dims import CannotEmit, Selection, Value
from unity_jax.rewrite.emitter import Emitter
from unity_jax.rewrite.table import has, naming
from unity_jax.rewrite.view import View
from unity_jax.trace import simplified


def emit(match: Match, view: View, turned: bool = False) -> tuple[Graph, tuple[Tensor, ...]]:
    """The program of the target, and the tensors that are its inputs; its outputs are the match's roots, in order.

    Matches that look alike have one program: its results are to be replaced by tensors of their own.

    **Arguments:** `turned`: join the parts of new sums in the other order.
    **Raises:** `CannotEmit`.
    """
    inputs = tuple(dict.fromkeys(match.taken))
    key = _asked(match, view, turned)
    if key not in view.emitted:
        try:
            view.emitted[key] = _made(match, view, inputs, turned)
        except CannotEmit as error:
            view.emitted[key] = str(error)
    found = view.emitted[key]
    if isinstance(found, str):
        raise CannotEmit(found)
    return found, inputs


def _asked(match: Match, view: View, turned: bool) -> object:
    """Equal for matches of which the targets are the same program: all that `Emitter` looks at, with tensors and
    dimensions numbered as they are met."""
    numbers: dict[object, int] = {}
    met: list[object] = []

    def dim(i: int) -> int:
        i = match.dims.find(i)
        if i not in numbers:
            numbers[i] = len(numbers)
            met.append((match.dims.size[i], tuple(map(dim, match.dims.parts(i)))))
        return numbers[i]

    def tensor(t: Tensor) -> int:
        if t not in numbers:
            numbers[t] = len(numbers)
            met.append((t.shape, t.dtype, None if t.literal is None else str(t.literal)))
        return numbers[t]

    def value(v: Value | Selection) -> object:
        if isinstance(v, Value):
            return tensor(v.tensor), tuple(map(dim, v.ids))
        rows = None if v.indices is None else value(v.indices)
        return v.kind, tuple(map(dim, v.ids)), rows, v.start, v.params

    def symbol(op: Op) -> object:
        constants = (view.source(t).literal for t in op.inputs)
        params = str(sorted(op.params.items()))
        return op.signature, params, tuple(None if c is None else str(c) for c in constants)

    asked = (
        match.rule.target,
        turned,
        tuple((name, value(v)) for name, v in match.values.items()),
        tuple((name, tuple(map(dim, ids))) for name, ids in match.names.items()),
        tuple((name, symbol(op)) for name, op in match.symbols.items()),
        tuple((t.op, symbol(seen.symbol)) for t, (_, seen) in match.terms.items() if has(t, "settings")),
        tuple(
            (value(v), tuple(tuple(map(dim, ids)) for ids in seen.attrs))
            for t, (v, seen) in match.terms.items()
            if naming(t) == "windows"
        ),
        tuple(map(value, match.roots)),
        tuple(map(value, match.rest)),
        tuple((name, dim(i)) for name, i in match.along.items()),
    )
    return asked, tuple(met)


def _made(match: Match, view: View, inputs: tuple[Tensor, ...], turned: bool) -> Graph:
    arrays = {t: Tensor(t.shape, t.dtype) for t in inputs}
    emitter = Emitter(match, view, arrays, turned)
    try:
        found = [emitter.result(t, root) for t, root in zip(match.rule.target, match.roots, strict=True)]
    except (TypeError, ValueError) as error:
        raise CannotEmit(str(error).splitlines()[0]) from error
    return simplified(Graph(tuple(arrays.values()), tuple(found), emitter.ops))
