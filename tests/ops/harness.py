"""Oracle for op rules: run every strategy of a rule under `shard_map` and compare with the unsharded op.

    check_rule(lambda x, y: x @ y, arg(8, 6), arg(6, 5))

traces the function, and for every op of it and every strategy of the op's rule on every mesh

* splits the operands as the rule says (padding filled with NaN and garbage, partial operands as random terms),
* runs the op's local program on CPU devices, in float64,
* joins the results as the rule says, on every group of devices that should hold equal copies, and compares,
* compares the collectives that the local program issues with those it announces (`Rule.inner`).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from unity_jax import _compat, trace
from unity_jax.ops.rule import REDUCTIONS, Rule, Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Graph, Op
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes

COVERED: dict[str, set[str]] = collections.defaultdict(set)
"""Per primitive, the kinds of strategy executed: `pass`, `sum`, ..., `halo`, `linear`, `uneven`, `replicated`."""
CHUNK = 24  # strategies compiled together
ONE_AXIS = False  # leave out meshes of several axes where there are others: their strategies combine those over one
ATOL = 1e-9  # relative to the largest magnitude of the result


def arg(*shape: int, dtype: Any = np.float64, low: float | None = None, high: float = 10, seed: int = 0) -> np.ndarray:
    """Random data: normal for floating types, else (or where `low` is given) uniform in `[low, high)`."""
    rng = np.random.default_rng((seed, *shape))
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(int(low or 0), int(high), shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    return np.asarray(rng.normal(size=shape) if low is None else rng.uniform(low, high, shape), dtype)


def ops_of(fn: Callable[..., Any], *args: Any) -> list[Op]:
    """The ops of the traced function."""
    with jax.enable_x64(True):
        return trace.build(jax.jit(fn).trace(*args).jaxpr).ops


def check_rule(
    fn: Callable[..., Any],
    *args: Any,
    mesh_sizes: Sequence[tuple[int, ...]] = ((2,), (2, 2)),
    only: str | Sequence[str] | None = None,
    rule: Callable[[Op], Rule] = rule_of,
    exact: bool = False,
    implemented: Callable[[Graph], Graph] = lambda graph: graph,
) -> dict[str, set[str]]:
    """Check the rules of the ops of `fn(*args)`.

    **Arguments:** `only`: the primitives to check (all by default); `rule`: where rules come from; `exact`:
    floating-point results must be equal bit by bit; `implemented`: the graph with other ops that make the same.
    **Returns:** the kinds of strategy executed, per primitive.
    """
    names = {only} if isinstance(only, str) else set(only) if only else None
    executed: dict[str, set[str]] = collections.defaultdict(set)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else jnp.asarray(x), args)
        jaxpr = jax.jit(fn).trace(*args).jaxpr
        graph = trace.build(jaxpr)
        env = dict(zip(graph.inputs, (*_compat.open_jaxpr(jaxpr)[1], *jax.tree.leaves(args)), strict=True))
        for op in graph.ops:
            operands = [env[t] if t.literal is None else t.literal for t in op.inputs]
            results = operands if op.eqn is None else _compat.bind(op.eqn, operands, op.params)
            env.update(zip(op.outputs, results, strict=True))
        for op in implemented(graph).ops:
            operands = [env[t] if t.literal is None else t.literal for t in op.inputs]
            results = [env[t] for t in op.outputs]
            if names is not None and op.name not in names:
                continue
            for sizes in [s for s in mesh_sizes if not ONE_AXIS or len(s) == 1] or mesh_sizes:
                for shards in _chunks(_shards(op, rule(op), sizes)):
                    for kinds in _check(shards, operands, results, exact):
                        executed[op.name] |= kinds
    assert executed, f"no op of {sorted(names or ())} among {[op.name for op in graph.ops]}"
    for name, kinds in executed.items():
        COVERED[name] |= kinds
    return dict(executed)


def _shards(op: Op, rule: Rule, sizes: tuple[int, ...]) -> Iterator[Shard]:
    """Every strategy that uses the whole mesh (a smaller mesh covers the others), and the replicated one.

    Strategies that differ only by a permutation of axes of equal size are one.
    """
    mesh = MeshAxes(tuple("xyz"[: len(sizes)]), sizes)
    seen = set()
    for strategy in strategies(rule, mesh):
        key = tuple(sorted(zip(sizes, strategy, strict=True)))
        if key not in seen and (-1 not in strategy or len(sizes) == 1):
            seen.add(key)
            yield Shard(op, rule, mesh, strategy)


def _chunks(items: Iterator[Shard]) -> Iterator[list[Shard]]:
    while chunk := list(itertools.islice(items, CHUNK)):
        yield chunk


def _check(shards: list[Shard], operands: list[Any], results: list[Any], exact: bool) -> Iterator[set[str]]:
    sizes = shards[0].mesh.sizes
    mesh = Mesh(np.array(jax.devices()[: shards[0].mesh.num_devices]).reshape(sizes), shards[0].mesh.names)
    operands, results = [_data(x) for x in operands], [_data(x) for x in results]
    locals_ = [
        [split(x, _widen(y, x.ndim), s.mesh) for x, y in zip(operands, s.operand_layouts, strict=True)] for s in shards
    ]
    traced = jax.jit(lambda all_: [_program(s, mesh)(*xs) for s, xs in zip(shards, all_, strict=True)]).trace(locals_)
    programs = [e for e in _compat.open_jaxpr(traced.jaxpr)[0].eqns if e.primitive.name == "shard_map"]
    outputs = jax.device_get(traced.lower().compile()(locals_))
    for shard, program, outs in zip(shards, programs, outputs, strict=True):
        where = f"{shard.op.name} {shard.rule} on {sizes}, strategy {shard.strategy}"
        announced = shard.rule.inner(shard) if shard.rule.inner else []
        issued = sorted(_collectives(program))
        assert issued == sorted((c.kind, c.axes, c.bytes) for c in announced), f"{where}: collectives"
        for i, (got, want, layout) in enumerate(zip(outs, results, shard.result_layouts, strict=True)):
            local = _widen(layout, want.ndim).local_shape(want.shape, shard.mesh)
            assert got.shape == (*sizes, *local), f"{where}: result {i} has local shape {got.shape}, not {local}"
            assert got.dtype == want.dtype, f"{where}: result {i} has dtype {got.dtype}, not {want.dtype}"
            for copy in join(got, _widen(layout, want.ndim), want.shape, shard.mesh):
                _compare(copy, want, f"{where}: result {i}", exact)
        yield _kinds(shard)


def _compare(got: np.ndarray, want: np.ndarray, where: str, exact: bool) -> None:
    if exact or want.dtype.kind not in "fc":
        np.testing.assert_array_equal(got, want, where)
        return
    finite = np.abs(want[np.isfinite(want)])
    scale = finite.max(initial=1.0) * (1 if want.dtype.itemsize >= 8 else 1e4)
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL * float(scale), err_msg=where)


def _kinds(shard: Shard) -> set[str]:
    n = len(shard.rule.factors)
    kinds = {"replicated" if s < 0 else "linear" if s >= n else shard.rule.factors[s].kind for s in shard.strategy}
    return kinds | ({"uneven"} if any(shard.is_padded(s) for s in shard.strategy if 0 <= s < n) else set())


def _program(shard: Shard, mesh: Mesh) -> Callable[..., Any]:
    """Stacked local operands (one leading dimension per mesh axis) to stacked local results."""
    lead = (0,) * len(mesh.axis_names)

    def body(*stacked: Any) -> Any:
        local = [_undata(x[lead], t.dtype) for x, t in zip(stacked, shard.op.inputs, strict=True)]
        for i, fills in enumerate(shard.fills):
            for fill in fills:
                local[i] = fill(local[i])
        return [_traced_data(y)[(None,) * len(lead)] for y in shard.run(local)]

    specs = PartitionSpec(*mesh.axis_names)
    return _compat.shard_map(body, mesh, specs, specs)


# Typed keys travel as their words, in trailing dimensions.


def _data(x: Any) -> np.ndarray:
    return np.asarray(_traced_data(x))


def _traced_data(x: Any) -> Any:
    return jax.random.key_data(x) if _compat.is_key(x.dtype) else x


def _undata(x: Any, dtype: Any) -> Any:
    if not _compat.is_key(dtype):
        return x
    return jax.random.wrap_key_data(x, impl=dtype._impl.name)


def _widen(layout: Layout, rank: int) -> Layout:
    return Layout(layout.dims + ((),) * (rank - len(layout.dims)), layout.partial)


# Splitting and joining


def garbage(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """What padding may hold: NaN, or any integer."""
    if dtype.kind in "fc":
        return np.full(shape, np.nan, dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    return (rng.random(shape) < 0.5).astype(dtype) if dtype.kind == "b" else np.full(shape, np.nan, dtype)


def split(x: np.ndarray, layout: Layout, mesh: MeshAxes) -> np.ndarray:
    """The shards of `x`, one leading dimension per mesh axis."""
    rng = np.random.default_rng(0)
    local = layout.local_shape(x.shape, mesh)
    padded = garbage(tuple(n * mesh.size(a) for n, a in zip(local, layout.dims, strict=True)), np.dtype(x.dtype), rng)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    terms = {(): padded}
    for axis, kind in layout.partial:
        assert kind == "sum", "only sums pass through an op"
        split_terms = {}
        for where, term in terms.items():
            parts = [rng.normal(size=term.shape).astype(term.dtype) for _ in range(mesh[axis] - 1)]
            split_terms |= {(*where, i): part for i, part in enumerate((*parts, term - sum(parts)))}
        terms = split_terms
    stacked = np.empty((*mesh.sizes, *local), x.dtype)
    for at in np.ndindex(*mesh.sizes):
        index = dict(zip(mesh.names, at, strict=True))
        stacked[at] = terms[tuple(index[a] for a in layout.partial_axes)][_block(layout, mesh, index, local)]
    return stacked


def join(stacked: np.ndarray, layout: Layout, shape: tuple[int, ...], mesh: MeshAxes) -> Iterator[np.ndarray]:
    """The whole tensor, once for every group of devices that holds a copy."""
    reduce = {"sum": np.add.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}
    for axis, kind in layout.partial:
        at = mesh.names.index(axis)
        stacked = np.repeat(reduce[kind](stacked, axis=at, keepdims=True), mesh[axis], at)
    local = stacked.shape[len(mesh.sizes) :]
    used = {*layout.axis_dim, *layout.partial_axes}
    free = [a for a in mesh.names if a not in used]
    for copy in itertools.product(*(range(mesh[a]) for a in free)):
        whole = np.empty(tuple(n * mesh.size(a) for n, a in zip(local, layout.dims, strict=True)), stacked.dtype)
        for at in np.ndindex(*mesh.sizes):
            index = dict(zip(mesh.names, at, strict=True))
            if all(index[a] == i for a, i in zip(free, copy, strict=True)):
                whole[_block(layout, mesh, index, local)] = stacked[at]
        yield whole[tuple(slice(0, n) for n in shape)]


def _block(layout: Layout, mesh: MeshAxes, index: dict[str, int], local: Sequence[int]) -> tuple[slice, ...]:
    starts = []
    for axes, n in zip(layout.dims, local, strict=True):
        at = 0
        for a in axes:
            at = at * mesh[a] + index[a]
        starts.append((at * n, n))
    return tuple(slice(s, s + n) for s, n in starts)


# Collectives inside local programs

_COLLECTIVES = {
    "ppermute": "permute",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}


def _collectives(eqn: Any) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for sub in core.jaxprs_in_params(eqn.params):
        for inner in _compat.open_jaxpr(sub)[0].eqns:
            if inner.primitive.name in _COLLECTIVES:
                axes = inner.params.get("axes", inner.params.get("axis_name"))
                nbytes = max(v.aval.size * v.aval.dtype.itemsize for v in (*inner.invars, *inner.outvars))
                yield _COLLECTIVES[inner.primitive.name], axes if isinstance(axes, tuple) else (axes,), nbytes
            yield from _collectives(inner)


assert set(REDUCTIONS) == {"sum", "max", "min"}  # what `join` knows
