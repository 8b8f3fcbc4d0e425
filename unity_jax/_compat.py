"""Every difference between the JAX versions we support (0.10.2, 0.11, 0.12) lives here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

Jaxpr = Any  # `ClosedJaxpr` and `Jaxpr` are one class from 0.11


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[Any, ...]]:
    """A jaxpr and its constants, from a closed or an open one."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # 0.11 replaced the counts by trees
    return len(consts), len(carry)


def source_line(eqn: Any) -> str:
    """`file.py:12:4 (function)` of the user's code that made the equation."""
    return source_info_util.summarize(eqn.source_info)


def name_stack(eqn: Any) -> str:
    """The `jax.named_scope` path, with the transforms it ran under: `transpose(jvp(Mlp))/dense`."""
    return str(eqn.source_info.name_stack)


def user_frame(eqn: Any) -> Any:
    """The traceback of an equation, to raise an error from the user's line; None where it was not kept."""
    return getattr(eqn.source_info, "traceback", None)


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
    result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(result) if eqn.primitive.multiple_results else [result]


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def is_key(dtype: Any) -> bool:
    """Whether the dtype is that of a typed PRNG key."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def is_float(dtype: Any) -> bool:
    """Whether values of the dtype can be partial sums without losing exactness of meaning (floating or complex)."""
    return not is_key(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))


def abstract_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    """A mesh without devices, its axes under the compiler's control (the default type of its axes changed in 0.11)."""
    return jax.sharding.AbstractMesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def auto_mesh(mesh: Any) -> Any:
    """The same mesh with axes of type Auto, which is what `shard_map` over all axes and placed arrays agree on."""
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


def shard_map(body: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over every axis of `mesh`, without the replication checks that our own layouts replace."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
