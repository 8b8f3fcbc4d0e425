"""The rules, strategies and shards of ops, each found once."""

from __future__ import annotations

from unity_jax.ops.rule import Rule, Shard, Strategy
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Op
from unity_jax.pcg.mesh import MeshAxes


class RuleCache:
    """The rules, strategies and shards of a program's ops, shared between ops of equal signature."""

    def __init__(self) -> None:
        self._rules: dict[object, Rule] = {}
        self._strategies: dict[object, list[Strategy]] = {}
        self._shards: dict[object, Shard] = {}

    def __call__(self, op: Op) -> Rule:
        found = self._rules.get(op.signature)
        if found is None:
            found = self._rules[op.signature] = rule_of(op)
        return found

    def strategies(self, op: Op, mesh: MeshAxes) -> list[Strategy]:
        key = (op.signature, mesh)
        found = self._strategies.get(key)
        if found is None:
            found = self._strategies[key] = strategies(self(op), mesh)
        return found

    def shard(self, op: Op, mesh: MeshAxes, strategy: Strategy) -> Shard:
        key = (op.signature, mesh, strategy)
        found = self._shards.get(key)
        if found is None:
            found = self._shards[key] = Shard(op, self(op), mesh, strategy)
        return found
