"""The plans of experts for a program: completed once, left out where they were far behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.built import Built
from unity_jax.search.experts import Expert, divides, expert_seeds, experts
from unity_jax.search.limits import LIMITS
from unity_jax.search.rule_cache import RuleCache


class Seeds:
    """Expert plans of one program. **Arguments:** `base`: those of the program that it is a variant of.

    **Fields:** `behind`: of a seed of a mesh, by its name and whether gathered weights are kept, how many times as long
    as the best plan of then it takes, at least.
    """

    def __init__(self, program: Program, rules: RuleCache, base: Seeds | None = None) -> None:
        self.program, self.rules, self.base = program, rules, base
        self.behind: dict[tuple[MeshAxes, str, bool], float] = {}
        self._found: dict[tuple[MeshAxes, bool, bool], dict[str, np.ndarray]] = {}
        self._completions: defaultdict[MeshAxes, dict[Expert, np.ndarray]] = defaultdict(dict)

    def is_far(self, mesh: MeshAxes, name: str, keep: bool = True) -> bool:
        """Whether a seed was so far behind that no rewrite brings it to the front."""
        return self.behind.get((mesh, name, keep), 0.0) > LIMITS.behind

    def was_far(self, mesh: MeshAxes, name: str, keep: bool = True) -> bool:
        """Whether it was for the program that this one is a variant of."""
        return self.base is not None and self.base.is_far(mesh, name, keep)

    def of(self, built: Built, new: bool, near: bool = False) -> dict[str, np.ndarray]:
        """Expert plans by name; `new`: only those that no coarser mesh can express for all tensors: what two axes
        together do not split one of them may; `near`: only those that were not far behind."""
        mesh, key = built.mesh, (built.mesh, new, near)
        if key not in self._found:
            styles = (e for e in experts(mesh) if not (near and any(self.was_far(*at) for at in e.named(mesh))))
            if new:
                styles = (e for e in styles if self._is_new(e, mesh))
            self._found[key] = self.completed(built, styles)
        return self._found[key]

    def _is_new(self, expert: Expert, mesh: MeshAxes) -> bool:
        """Whether no coarser mesh can express an expert; one that shards over all axes, if some weight cannot be."""
        if not expert.is_combined:
            return expert.shard_state and len(mesh.names) == 2 and not divides(self.program, mesh.num_devices)
        return len(mesh.names) == 2 or bool(expert.over) or len(expert.data) == 2

    def near(self, mesh: MeshAxes, meshes: Sequence[MeshAxes]) -> Iterator[Expert]:
        """The experts of a mesh that no coarser one of some meshes expresses, and that were not far behind: here, or if
        this is a variant, for what it is one of."""
        of = self.base or self
        for expert in experts(mesh):
            names = list(expert.named(mesh))
            if not any(at != mesh and at in meshes for at, _ in names) and not any(of.is_far(*at) for at in names):
                yield expert

    def completed(self, built: Built, styles: Iterable[Expert]) -> dict[str, np.ndarray]:
        """Expert plans, whether weights are gathered again or not: they come out the same."""
        return expert_seeds(self.program, built, built.mesh, self.rules, styles, self._completions[built.mesh])
