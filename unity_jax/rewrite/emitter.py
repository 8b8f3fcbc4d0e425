"""Makes the terms of a rule's target as tensors, for what a match has found.

Tensors carry the identities of their dimensions, so that ops find theirs; what a tensor does not depend on it does not
have, and gets only where an op or a result needs it. Ops are what JAX traces for a function of tensors of these types,
once for all sizes where it is one op (`sizes`): hardly anything is traced for a target that does not exist after all.

    e.call(lax.transpose, x, permutation=(1, 0))        the result; its op is added to `e.ops`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.rewrite.bind import Match
from unity_jax.rewrite.dims import CannotEmit, Ids, Named, Selection, Value
from unity_jax.rewrite.language import Dim, Term
from unity_jax.rewrite.sizes import SIZES
from unity_jax.rewrite.table import OPS
from unity_jax.rewrite.view import View
from unity_jax.trace import build


class Emitter:
    """Makes the terms of a target: each as a tensor of which every dimension is one that rules bind (`Dims.all`).

    **Arguments:** `arrays`: what stands for the tensors that the target is made from.
    """

    def __init__(self, match: Match, view: View, arrays: dict[Tensor, Tensor], turned: bool) -> None:
        self.turned = frozenset(match.along if turned else ())
        self.match, self.view, self.arrays, self.dims = match, view, arrays, match.dims
        self.done: dict[Term, Named] = {}
        self.fresh: dict[Dim, int] = {}
        self.ops: list[Op] = []

    # Ops

    def call(self, function: Callable[..., Any], *operands: Tensor, like: Sequence[Any] = (), **params: Any) -> Tensor:
        """The result of a JAX function of some tensors, whose ops are added.

        **Arguments:** `like`: parameters that do not depend on sizes, by name.
        **Raises:** `CannotEmit` where JAX refuses.
        """
        sizes, dtypes, settings = SIZES.get(function), [t.dtype for t in operands], dict(like)
        shape = None if sizes is None else sizes(*operands, **params)
        own = () if shape is not None else (*(t.shape for t in operands), *params.items())
        key, known = (function, *dtypes, *like, *own), self.view.emitted
        if key not in known:
            known[key] = _traced(function, operands, {**params, **settings})
        found = known[key]
        if isinstance(found, str):
            raise CannotEmit(found)
        if shape is not None:
            (op,) = found.ops
            made = Tensor(shape, op.outputs[0].dtype)
            self.ops.append(dataclasses.replace(op, inputs=operands, outputs=(made,), params={**op.params, **params}))
            return made
        names = dict(zip(found.inputs, operands, strict=True))
        for op in found.ops:
            names.update((t, dataclasses.replace(t)) for t in op.outputs)
            inputs, outputs = (tuple(names.get(t, t) for t in ts) for ts in (op.inputs, op.outputs))
            self.ops.append(dataclasses.replace(op, inputs=inputs, outputs=outputs))
        (result,) = found.outputs
        return names.get(result, result)

    def like(self, op: Op, operands: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """What an op of the source that works element by element makes of other operands."""
        if [t.dtype for t in operands] != [t.dtype for t in op.inputs]:
            return self.call(again, *operands, op=op)
        made = Tensor(shape, op.outputs[0].dtype)
        self.ops.append(dataclasses.replace(op, inputs=tuple(operands), outputs=(made,)))
        return made

    def cut(self, x: Tensor, start: int, limit: int, axis: int) -> Tensor:
        """What lies between two places of a dimension."""
        starts, limits = [0] * x.rank, [*x.shape]
        starts[axis], limits[axis] = start, limit
        ends = {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
        return self.call(lax.slice, x, **ends, strides=(1,) * x.rank)

    def at(self, x: Tensor, index: int, axis: int) -> Tensor:
        """One place of a dimension, which the result does not have."""
        return self.call(lax.squeeze, self.cut(x, index, index + 1, axis), dimensions=(axis,))

    # Dimensions

    def ids(self, name: Dim | int) -> Ids:
        """The identities that a name stands for; those of a sum that the source does not have are made."""
        assert isinstance(name, Dim)
        if name in self.match.names:
            return self.dims.all(self.match.names[name])
        if name not in self.fresh:
            if name.name != "+":
                raise CannotEmit(f"{name} stands for no dimension")
            self.fresh[name] = self.dims.fresh(sum(self.size(p) for p in name.parts))
        return (self.fresh[name],)

    def named(self, term: Term) -> Ids:
        """The dimensions that an op names, once its operands are made: they may make one of them, as `stack` does."""
        for a in term.args:
            if a.op:
                self.term(a)
        return tuple(i for name in term.attrs for i in self.ids(name))

    def plain(self, ids: Ids) -> Ids:
        """Identities of dimensions none of which is a product."""
        found = self.dims.all(ids)
        if len(found) != len(ids):
            raise CannotEmit("a dimension is several")
        return found

    def one(self, name: Dim | int) -> int:
        """The identity of a name that stands for one dimension, or of the one along which it is concatenated."""
        assert isinstance(name, Dim)
        if name in self.match.along:
            return self.dims.find(self.match.along[name])
        ids = self.ids(name)
        if len(ids) != 1:
            raise CannotEmit(f"{name} stands for {len(ids)} dimensions")
        return ids[0]

    def size(self, name: Dim) -> int:
        return self.dims.size[self.one(name)]

    def part(self, whole: Dim, which: int) -> tuple[int, int, int]:
        """Identity, start and limit of a part of a sum; a part the source does not name has what the others leave."""
        sizes: list[int | None] = [self.size(p) if p in self.match.names else None for p in whole.parts]
        if sizes.count(None) > 1:
            raise CannotEmit(f"{whole} has parts of unknown size")
        rest = self.dims.size[self.one(whole)] - sum(n for n in sizes if n is not None)
        known = [rest if n is None else n for n in sizes]
        name = whole.parts[which]
        if name not in self.match.names and name not in self.fresh:
            self.fresh[name] = self.dims.fresh(rest)
        start = sum(known[which + 1 :] if whole in self.turned else known[:which])
        return self.one(name), start, start + known[which]

    # Tensors

    def opened(self, x: Named) -> Named:
        """The tensor with its products split into what they are products of."""
        ids = self.dims.all(x.ids)
        return Named(self._shaped(x.array, ids), ids) if len(ids) != len(x.ids) else Named(x.array, ids)

    def _shaped(self, array: Tensor, ids: Sequence[int]) -> Tensor:
        shape = tuple(self.dims.size[i] for i in ids)
        return array if array.shape == shape else self.call(lax.reshape, array, new_sizes=shape)

    def aligned(self, x: Named, ids: Sequence[int]) -> Tensor:
        """The tensor with exactly these dimensions, in this order: moved, and broadcast where it lacks one."""
        x, wanted = self.opened(x), self.dims.all(ids)
        extra = [d for d, i in enumerate(x.ids) if i not in wanted]
        if any(x.array.shape[d] != 1 for d in extra):
            raise CannotEmit("a dimension is left over")
        array, have = x.array, [i for i in x.ids if i in wanted]
        if extra:
            array = self.call(lax.squeeze, array, dimensions=tuple(extra))
        order = [have.index(i) for i in wanted if i in have]
        if order != sorted(order):
            array = self.call(lax.transpose, array, permutation=tuple(order))
        shape = tuple(self.dims.size[i] for i in wanted)
        if array.shape != shape:
            at = tuple(d for d, i in enumerate(wanted) if i in have)
            array = self.call(lax.broadcast_in_dim, array, shape=shape, broadcast_dimensions=at)
        return self._shaped(array, tuple(map(self.dims.find, ids))) if len(wanted) != len(ids) else array

    def with_ids(self, x: Named, *needed: int) -> Named:
        """The tensor with these dimensions as well."""
        missing = tuple(i for i in needed if i not in x.ids)
        ids = (*missing, *x.ids)
        return Named(self.aligned(x, ids), ids) if missing else x

    def lean(self, x: Named, kept: Ids = ()) -> Named:
        """The tensor without what relabelling left: dimensions of size one that no result has, nor are to be kept."""
        used = {*kept, *(i for root in self.match.roots for i in self.dims.all(root.ids))}
        gone = [d for d, i in enumerate(x.ids) if x.array.shape[d] == 1 and i not in used]
        left = tuple(i for d, i in enumerate(x.ids) if d not in gone)
        return Named(self.call(lax.squeeze, x.array, dimensions=tuple(gone)), left) if gone else x

    def together(self, *operands: Named) -> tuple[list[Tensor], Ids]:
        """Tensors of one shape: that of all their dimensions."""
        widest = max(operands, key=lambda x: len(x.ids))
        ids = tuple(dict.fromkeys((*widest.ids, *(i for x in operands for i in x.ids))))
        return [self.aligned(x, ids) for x in operands], ids

    def result(self, term: Term, root: Value) -> Tensor:
        found = self.term(term)
        for value in self.match.rest:
            arrays, ids = self.together(self.read(value), found)
            found = Named(self.call(lax.add, *arrays), ids)
        array = self.aligned(found, root.ids)
        if array.dtype != root.tensor.dtype:
            raise CannotEmit(f"{array.dtype} instead of {root.tensor.dtype}")
        return array

    def term(self, term: Term) -> Named:
        if term not in self.done:
            found = self.variable(term) if not term.op else self._made(term)
            self.done[term] = found
        return self.done[term]

    def _made(self, term: Term) -> Named:
        emit = OPS[term.op].emit
        if emit is None:
            raise CannotEmit(f"{term.op} is no op of a program")
        return emit(self, term)

    def variable(self, term: Term) -> Named:
        value = self.match.values[term.name]
        assert isinstance(value, Value)
        return self.read(value)

    def read(self, value: Value) -> Named:
        return self.opened(Named(self.arrays.get(value.tensor, value.tensor), value.ids))

    def arguments(self, term: Term, kept: Ids = ()) -> list[Named]:
        """The operands that are values, lean but for what the op names."""
        return [self.lean(self.term(a), kept) for a in term.args if a.type.ids is None]

    def every(self, name: str) -> list[Op]:
        """The ops of the source that are seen as an op of this name."""
        return [seen.symbol for t, (_, seen) in self.match.terms.items() if t.op == name]

    def matched(self, name: str) -> Op:
        """An op of the source that the target's op of this name copies settings from."""
        return self.match.symbols[name] if name in self.match.symbols else self.every(name)[0]

    def selection(self, term: Term) -> Selection:
        found = self.match.values[term.args[-1].name]
        assert isinstance(found, Selection)
        return found


def again(*arrays: Any, op: Op, **params: Any) -> Any:
    """What an op of the source makes of other operands, with some parameters changed."""
    (made,) = _compat.bind(op.eqn, arrays, {**op.params, **params})
    return made


def _traced(function: Callable[..., Any], operands: Sequence[Tensor], params: dict[str, Any]) -> Graph | str:
    """What JAX traces for a function of tensors of these types, or why it refuses."""
    failed: list[str] = []

    def run(*arrays: Any) -> list[Any]:
        try:
            return [function(*arrays, **params)]
        except (TypeError, ValueError) as error:  # kept from JAX, which would spend its time on the traceback
            failed.append(str(error).splitlines()[0])
            return []

    jaxpr = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands))
    return failed[0] if failed else build(jaxpr)
