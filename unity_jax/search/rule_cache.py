"""The rules, strategies and shards of ops, each found once."""

from __future__ import annotations

from unity_jax.ops.rule import Rule, Shard, Strategy, strategies
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.graph import Op
from unity_jax.pcg.mesh import MeshAxes


class RuleCache:
    """The rules, strategies and shards of a program's ops, shared between ops of equal signature."""

    def __init__(self) -> None:
        self._rules: dict[object, Rule] = {}
        self._strategies: dict[object, list[Strategy]] = {}
        self._shards: dict[object, Shard] = {}

    def __call__(self, op: Op) -> Rule:
        if op.signature not in self._rules:
            self._rules[op.signature] = rule_of(op)
        return self._rules[op.signature]

    def strategies(self, op: Op, mesh: MeshAxes) -> list[Strategy]:
        key = (op.signature, mesh)
        if key not in self._strategies:
            self._strategies[key] = strategies(self(op), mesh)
        return self._strategies[key]

    def shard(self, op: Op, mesh: MeshAxes, strategy: Strategy) -> Shard:
        key = (op.signature, mesh, strategy)
        if key not in self._shards:
            self._shards[key] = Shard(op, self(op), mesh, strategy)
        return self._shards[key]
