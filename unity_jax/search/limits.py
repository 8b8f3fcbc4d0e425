"""How far a search goes: every bound on what it tries, and how much something must gain to be worth trying.

They are one value, which is part of what kept plans are found by (`planning.make`): another value plans anew. All of
them are counts of things, never seconds, so that a plan does not depend on how fast the machine is that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a search."""

    # Meshes
    waiting: float = 0.08
    """The part of a step that exposed communication, undivided arguments and uneven arithmetic may take before other
    meshes are worth trying."""
    mesh_saves: float = 0.02
    """The part of a step that a plan for another mesh must be able to save."""
    finer: float = 0.25
    """The part of a step beyond the floor of its mesh, all arithmetic divided, before finer meshes are worth trying: of
    GPT-3 175B on 512 H100 it is .22, with attention as XLA makes it .13, and none of three axes saves a thousandth; of
    Mixtral 8x7B .46, and one saves a sixth; of U-Net with four images on each of 64 v5e .73, and one of two axes saves
    .38."""
    many_nodes: int = 16
    """How many parts a level of the network has of which an inner axis may span some."""
    axis_choices: int = 100_000
    """Strategies of all ops together, beyond which two axes are planned one at a time; three always are."""

    # Memory
    near_free: float = 1.1
    """How much slower than without a memory limit a plan may be that makes a search under the limit superfluous."""
    short: float = 2.0
    """How many times as much memory as there is a plan for a coarser mesh takes, where a plan for a finer one without a
    limit is only to tell how fast one could be: it is made of seeds, and searched for if it wins."""
    needs: float = 1.25
    """Times the limit that a plan of an expert takes by the problem's liveness that is not made, if that is more than
    some plan needs: over the zoo that is .66 to 1.01 of what plans need."""
    reserve: tuple[float, ...] = (0.15, 0.075)
    """The part of it that the first plan leaves, the first of these that costs little: XLA's heap has gaps, and its
    schedules hold some values for longer than is predicted."""
    reserved: float = 1.1
    """How many times as long as without that part a plan may take with it."""
    tightened: int = 3
    """How often a problem is solved under a limit that is tightened."""
    recomputed: float = 0.01
    """The part of a step that computing something again may save where there is memory for all: of
    small ViT and LLaMA .4 %."""
    kept_beside: int = 3
    """For how many plans that keep what `jax.checkpoint` would recompute, in all layers, other plans of the program
    keep as much: the fastest of them."""
    kept_experts: int = 2
    """For how many of these experts' plans are made, too: of T5 on 64 v5e, the second fastest gains more by them."""
    packing_saves: float = 1e-2
    """The part of a step that packed state must save: what others see of it they pay for (`lower.parts`)."""

    # Experts
    behind: float = 1.1
    """How many times as long as the best one a plan takes that no rewrite, nor a search, brings to the front."""
    hides: float = 1.8
    """How many times as long as its step the times of an expert's plan most likely add up to, at most: where arithmetic
    and communication hide each other, twice as long. Of the 207 plans in the zoo that add up to more than so many times
    the step of the best one, none takes less than 1.04 times as long. Used where a mesh need not be tried at all:
    collectives of tiny programs, which are combined, add up to more."""

    # Rewritten programs
    variants: int = 32
    """How many are planned."""
    variant_ops: int = 8_000
    """Ops of all of them together, of folded programs if they are deep."""
    made: int = 3
    """How many are made for each that may be planned."""
    followed: int = 200
    """Steps that may follow from all moves that are made: in the zoo up to 128 do, from one; of a graph network of 300
    ops 1,195, of which chains of 57 that end alike are nine tenths."""
    worse: float = 1.05
    """How much slower than the best one may be that is rewritten further (MetaFlow, section 4), or the plan of another
    mesh by its lower bound that is searched for further."""
    saves: float = 1e-3
    """The part of a step that a rewrite must save, or a ring."""
    patience: int = 5
    """How many may be planned, one after the other, of which none is better: over the zoo at `tiny` size on two
    machines, what is better is planned first, or after three in vain at most."""
    vain: int = 16
    """How many may be made, one after the other, that save nothing: over the same programs, up to thirteen in vain were
    followed by one that saves."""

    # Rings
    ring_shards: int = 16
    """The most shards: a ring's program is as long as it has shards."""
    ring_ops: int = 30_000
    """Ops of all plans with rings together that are simulated, beyond the first plan: a large model has tens of
    thousands, and each takes as long as another candidate."""

    # Deep programs
    alike: float = 0.005
    """How much slower than the best one a plan of a folded program may be that is done on the whole, too: of BERT with
    12 layers on eight H100, experts' plans take .997 to 1.041 times as long as by the folded program."""
    periods: int = 512
    """How many distances from an op to the next of its kind are tried, the commonest first."""
    cut: float = 0.01
    """The part of a program's ops that a run of layers must let go of."""

    # The layout problem
    table: int = 2**20
    """The most entries of any table of an exact solution."""
    tried_work: float = 2.0**28
    """Entries of all sums of one step of a search."""
    sweeps: int = 6
    """Passes of messages there and back."""
    gap: float = 0.01
    """What is not worth more than bounds and messages."""
    proved: float = 1e-6
    """The gap, as a part of its cost, that rounding alone may leave between an assignment and its lower bound."""
    fixing: float = 0.8
    """Dead ends are looked for again where less than this part of strategies is left."""
    steps: int = 20_000
    """Variables that branch and bound visits."""
    repairs: int = 4
    """Changes for each node that make a plan fit."""
    cuts: int = 12
    """Solutions for prices on memory."""
    graded: int = 5
    """Solutions with prices that differ a little along the step."""
    grades: int = 8
    """Distinct prices of these: repeated layers within one grade stay alike."""


LIMITS = Limits()
