"""One rule per primitive: how an op may be split, what a device then runs, and what that costs.

    rule_of(op)                     the `Rule` of an op: every `Factor` of it, and of which dimensions
    strategies(rule, mesh)          every way to split them over the axes of a mesh
    Shard(op, rule, mesh, strategy) the op split one way: local shapes, local program, work
    register, make_rule             to add a rule: a function of a few lines in the file of its family

Importing this package fills the registry, from the modules of `FAMILIES`.
"""

from unity_jax.ops import (
    attention,
    bags,
    constraint,
    contraction,
    convolution,
    effects,
    indexing,
    linalg,
    manual,
    random,
    reduction,
    shape,
    sorting,
    window,
)
from unity_jax.ops.rule import Factor, Rule, Shard, make_rule, register
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies

FAMILIES = (
    attention,
    bags,
    constraint,
    contraction,
    convolution,
    effects,
    indexing,
    linalg,
    manual,
    random,
    reduction,
    shape,
    sorting,
    window,
)
"""The modules that register rules, a family of primitives each."""

__all__ = ["FAMILIES", "Factor", "Rule", "Shard", "make_rule", "register", "rule_of", "strategies"]
