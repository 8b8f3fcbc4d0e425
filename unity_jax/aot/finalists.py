"""Which of several plans is the best by what the compiler itself says of their programs.

    best_compiled(candidates, lowered, platform="tpu", clock=1.5e9, limit=16e9)

The cost model chooses the candidates; what XLA makes of each has the last word. XLA:TPU estimates the cycles of every
kernel, to which the predicted exposed communication is added. XLA:GPU and XLA:CPU estimate none, so there the predicted
seconds stay, and what the program allocates decides whether a candidate fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from unity_jax.aot.bundles import empty, schedules, with_schedules
from unity_jax.aot.compiled import CompiledMemory, used
from unity_jax.aot.cycles import estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import compiled_for
from unity_jax.search.candidate import Candidate


@dataclass(frozen=True)
class Trial:
    """What a compiler made of a candidate.

    **Fields:** `peak` in bytes per device, infinite if it would not compile it; `seconds` of a step by its own
    estimate, or as predicted where it has none.
    """

    peak: float
    seconds: float


def best_compiled(
    candidates: Sequence[Candidate],
    lowered: Callable[[Candidate], jax.stages.Lowered],
    platform: str,
    clock: float | None,
    limit: float,
) -> tuple[Trial, Candidate]:
    """The fastest candidate whose program fits, and what the compiler made of it; if none does, the one that needs the
    least memory. A program that the compiler refuses does not win, unless it refuses all; then the first one stays.

    **Arguments:** `candidates`: best first, which wins a tie; `lowered`: the program of one; `clock`: cycles per second
    of a TPU; `limit`: bytes per device.
    """
    trials = [(trial(c, lowered(c), platform, clock), c) for c in candidates]
    if fit := [(t, c) for t, c in trials if t.peak <= limit]:
        return min(fit, key=lambda found: found[0].seconds)
    return min(trials, key=lambda found: found[0].peak)


def trial(candidate: Candidate, lowered: jax.stages.Lowered, platform: str, clock: float | None) -> Trial:
    """Compile a candidate's program."""
    empty()
    try:
        program = compiled_for(lowered, platform)
    except jax.errors.JaxRuntimeError as error:
        return Trial(used(error), candidate.seconds)
    peak = CompiledMemory.of(program).peak
    if clock is None:
        return Trial(peak, candidate.seconds)
    module = parse(program.as_text() or "")
    cycles = estimated_cycles(with_schedules(module, schedules(module)))
    return Trial(peak, cycles.total / clock + candidate.timeline.exposed_communication_seconds)
