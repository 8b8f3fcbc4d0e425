"""Every difference between the JAX versions we support (0.10.2, 0.11, 0.12) lives here."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.array import ArrayImpl
from jax.extend import core, source_info_util

Jaxpr = Any  # `ClosedJaxpr` and `Jaxpr` are one class from 0.11


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[Any, ...]]:
    """A jaxpr and its constants, from a closed or an open one."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def expanded(eqn: Any) -> Jaxpr:
    """What a `call_hi_primitive` computes, by other primitives: JAX 0.12 has such for `searchsorted`."""
    primitive = eqn.params["_prim"]

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves)))

    return jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # 0.11 replaced the counts by trees
    return len(consts), len(carry)


_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\](chex|diffrax|einops|equinox|flax|haiku|jaxtyping|optax)[/\\]")
_OURS = os.path.dirname(__file__) + os.sep


def source_line(eqn: Any) -> str:
    """`file.py:12:4 (function)` of the user's code that made the equation, such as the line that calls a Flax layer.

    A line of the library where no other is known, and nothing where none is, or where we made the equation.
    """
    innermost = source_info_util.summarize(eqn.source_info)
    if innermost.startswith(_OURS):
        return ""
    if not _LIBRARY.search(innermost):
        return innermost
    for line in reversed(source_info_util.summarize(eqn.source_info, 1000).split("\n")):
        if line.startswith(_OURS):
            break  # what lies further out called us, and says nothing about the equation
        if not _LIBRARY.search(line):
            return line
    return innermost


def name_stack(eqn: Any) -> str:
    """The `jax.named_scope` path, with the transforms it ran under: `transpose(jvp(Mlp))/dense`."""
    return str(eqn.source_info.name_stack)


def threefry_partitionable(eqn: Any) -> bool:
    """Whether the random bits of this equation do not depend on how they are split."""
    return bool(eqn.ctx.threefry_partitionable)


def compute_type(eqn: Any) -> str | None:
    """The `compute_on` annotation of an equation."""
    return eqn.ctx.compute_type


def bind(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Evaluate the equation's primitive on new operands with new parameters; always returns a list."""
    # Parameters that name a sharding describe the global program; inside `shard_map` every value is local.
    params = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
    with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):  # what the user's trace was under decides the bits
        if eqn.primitive.name == "pallas_call":  # its interpreter enters the contexts of the kernel's equations
            present = [e.replace(ctx=type(e.ctx)()) for e in params["jaxpr"].eqns]
            params["jaxpr"] = params["jaxpr"].replace(eqns=present)
        result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(result) if eqn.primitive.multiple_results else [result]


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Evaluate an open jaxpr traced for another mesh context: equations are bound in the present one."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive.name in ("pvary", "pcast", "mesh_cast", "sharding_constraint", "reshard"):
            results = operands  # they say where values may vary or lie, which `shard_map` without checks does not ask
        elif eqn.primitive.name == "psum_invariant":  # `psum` where `shard_map` checks, which ours does not
            results = [jax.lax.psum(x, eqn.params["axes"]) for x in operands]
        elif eqn.primitive.name == "all_gather_invariant":
            p = eqn.params
            dim, tiled = p["all_gather_dimension"], p["tiled"]
            results = [jax.lax.all_gather(x, p["axis_name"], axis=dim, tiled=tiled) for x in operands]
        else:
            results = bind(eqn, operands, eqn.params)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


is_deleted = ArrayImpl.is_deleted
"""Of an array of JAX's own class; raises `TypeError` for all else."""

sharding = attrgetter("_sharding")
"""Of an array of JAX's own class, whose property `sharding` is a function in Python and takes twice as long."""


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def is_key(dtype: Any) -> bool:
    """Whether the dtype is that of a typed PRNG key."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=256)
def is_float(dtype: Any) -> bool:
    """Whether values of the dtype can be partial sums without losing exactness of meaning (floating or complex).

    Those of less than 16 bits cannot: they round each term by more than a sum may be off, some have no zero or no
    infinity, and collectives do not add them.
    """
    return not is_key(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact)) and not is_narrow(dtype)


def is_narrow(dtype: Any) -> bool:
    """Whether the dtype is a floating-point type of less than 16 bits."""
    return not is_key(dtype) and bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 16


def represents(wide: Any, dtype: Any) -> bool:
    """Whether a floating or complex dtype has every value of another (JAX promotes no type of less than 16 bits)."""
    if jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.issubdtype(wide, jnp.complexfloating):
        return False
    a, b = jnp.finfo(wide), jnp.finfo(dtype)
    return bool(a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp)


def abstract_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """A mesh without devices, its axes under the compiler's control (the default type of its axes changed in 0.11)."""
    return jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def auto_mesh(mesh: Any) -> Any:
    """The same mesh with all axes of type Auto: `shard_map` over Explicit axes would check types that our layouts
    replace."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


def abstract_twin(mesh: Any) -> Any:
    """The mesh without its devices."""
    return mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh


def ambient_mesh() -> Any | None:
    """The mesh of `jax.set_mesh`, with its devices where they are known (outside `jit`); None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside `jit`
        return mesh
    return concrete if concrete.axis_names == mesh.axis_names else mesh


def has_explicit_axes(mesh: Any) -> bool:
    return any(t == jax.sharding.AxisType.Explicit for t in mesh.axis_types)


def shard_map(body: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over every axis of `mesh`, without the replication checks that our own layouts replace."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def quiet(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule that does not tell users that Pallas for GPUs will be lowered by Mosaic instead of Triton, as jax
    0.12 does: which of them lowers our kernels is not theirs to choose."""

    @functools.wraps(rule)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            return rule(*args, **kwargs)

    return lowered


def is_pushed(leaf: Any) -> bool:
    """Whether a value carries a tangent of forward-mode differentiation."""
    from jax.interpreters import ad

    return isinstance(leaf, ad.JVPTracer)


def is_weak(aval: Any) -> bool:
    """Whether a type gives way to others, as those of Python's numbers do."""
    return bool(getattr(aval, "weak_type", False))


def weakened(x: Any) -> Any:
    """An array whose type gives way to others; under `jit` it costs nothing."""
    from jax._src.lax import lax as lax_internal

    return lax_internal._convert_element_type(x, x.dtype, weak_type=True)


def register_array(cls: type, aval: Callable[[Any], Any], array: Callable[[Any], Any]) -> None:
    """Let JAX take instances of a class for arrays: by their types where it traces, as arrays where it runs."""
    from jax._src import core as core_tables
    from jax._src import dtypes as dtype_tables

    core_tables.pytype_aval_mappings[cls] = aval
    dtype_tables.register_canonicalize_value_handler(cls, array)
