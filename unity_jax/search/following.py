"""Plans of variants of a program that do what its plan does, and what that has of it on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from unity_jax.cost.program import local_bytes
from unity_jax.pcg.graph import Tensor
from unity_jax.program import Program
from unity_jax.residuals.record import Saving
from unity_jax.search.candidate import Candidate


class Follow(Protocol):
    """Makes the plan of a variant of a program that does what a plan of that does."""

    def __call__(self, plan: Candidate, program: Program, like: Mapping[Tensor, Tensor]) -> Candidate:
        """**Arguments:** `like`: what the program before has in place of tensors of the variant."""


def followed(start: Candidate, savings: Sequence[Saving], follow: Follow) -> Candidate:
    """The plan of a program that needs less memory, each saving made of what those before it leave. Raises
    `LookupError` where one cannot be made."""
    program, like = start.program, dict[Tensor, Tensor]()
    for how in savings:
        made = how.applied(program.graph)
        of = {t: origin for t, origin in made.origin.items() if isinstance(origin, Tensor)}
        like.update((t, like.get(origin, origin)) for t, origin in of.items())
        program = program.saving(made, how)
    return follow(start, program, like)


def local(found: Candidate) -> dict[Tensor, int]:
    """Bytes of the tensors of a program on one device, as a plan holds them."""
    return {t: local_bytes(p, found.mesh) for t, p in planned(found).items()}


def planned(found: Candidate) -> dict[Tensor, Tensor]:
    """The tensors that a program makes, and the same as a plan holds them."""
    pairs = ((op.traced.outputs, op.outputs) for op in found.graph.walk() if op.traced is not None)
    return {t: planned for before, after in pairs for t, planned in zip(before, after, strict=True)}
