"""How far a search goes: every bound on what it tries, and how much something must gain to be worth trying.

They are one value, which is part of what kept plans are found by (`planning.make`): another value plans anew. All of
them are counts of things, never seconds, so that a plan does not depend on how fast the machine is that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a search.

    **Fields:** of the meshes that are tried: `waiting`: the part of a step that exposed communication, undivided
    arguments and uneven arithmetic may take before other meshes are worth trying; `mesh_saves`: the part of a step that
    a plan for another mesh must be able to save; `near_free`: how much slower than without a memory limit a plan may be
    that makes a search under the limit superfluous; `axis_choices`: strategies of all ops together beyond which two
    axes are planned one at a time.

    Of experts: `behind`: how many times as long as the best one a plan takes that no rewrite brings to the front;
    `far`: how many times as long as the best plan for its twin an expert's takes at least that is not tried for a
    program.

    Of rewritten programs: `variants`: how many are planned; `variant_ops`: ops of all of them together, those of twins
    for deep programs; `made`: how many are made for each that may be planned; `worse`: how much slower than the best
    one may be that is rewritten further (MetaFlow, section 4); `saves`: the part of a step that a rewrite, or a ring,
    must save; `patience`: how many may be planned one after the other of which none is better: over the zoo at `tiny`
    size on two machines, what is better is planned first, or after three in vain at most; `vain`: how many may be made
    one after the other that save nothing: over the same programs, up to thirteen in vain were followed by one that
    saves.

    Of rings: `ring_shards`: the most shards, since a ring's program is as long as it has shards; `ring_ops`: ops of all
    plans with rings together that are simulated, beyond the first plan: a large model has tens of thousands, and each
    takes as long as another candidate.

    Of twins of deep programs: `periods`: how many distances from an op to the next of its kind are tried, the commonest
    first; `cut`: the part of a program's ops that a run of layers must let go of.

    Of packed state: `packing_saves`: the part of a step that it must save: what others see of such state they pay for
    (`lower.parts`).

    Of the layout problem: `table`: the most entries of any table of an exact solution; `tried_table`, `tried_work`:
    entries of a table and of all tables that one step of a search may cost, where an exact one may use `table`;
    `rounds`: of bounding and fixing; `sweeps`: of messages in each; `tries`: exact solutions over restricted domains in
    each; `gap`: what is not worth another round; `fixing`: dead ends are looked for, and bounds made, again where less
    than this part of strategies is left; `steps`: variables that branch and bound visits; `repairs`: changes for each
    node; `cuts`: solutions for prices on memory; `graded`: solutions with prices that differ a little along the step,
    in `grades` grades, so that repeated layers within one stay alike.
    """

    waiting: float = 0.08
    mesh_saves: float = 0.02
    near_free: float = 1.1
    axis_choices: int = 100_000

    behind: float = 1.1
    far: float = 1.5

    variants: int = 32
    variant_ops: int = 8_000
    made: int = 3
    worse: float = 1.05
    saves: float = 1e-3
    patience: int = 5
    vain: int = 16

    ring_shards: int = 16
    ring_ops: int = 30_000

    periods: int = 64
    cut: float = 0.01

    packing_saves: float = 1e-2

    table: int = 10**7
    tried_table: float = 2.0**20
    tried_work: float = 2.0**28
    rounds: int = 2
    sweeps: int = 20
    tries: int = 4
    gap: float = 0.005
    fixing: float = 0.8
    steps: int = 20_000
    repairs: int = 4
    cuts: int = 12
    graded: int = 5
    grades: int = 8


LIMITS = Limits()
