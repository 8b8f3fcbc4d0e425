"""How XLA's compilers differ, as far as the cost model follows them: one row for each, and no test of a name elsewhere.

    if target_of(device).library: ...

What is told here is true of every chip that a compiler compiles for; what differs between chips is in `Device`.
"""

from __future__ import annotations

from dataclasses import dataclass

from unity_jax.machine.device import Device

_COSTLY = frozenset("exp exp2 expm1 log log1p logistic tanh sin cos erf erf_inv erfc pow rsqrt sqrt div".split())
ACTIVATIONS = frozenset("erf erfc logistic".split())
"""Those that XLA:TPU computes again, in the backward pass that is: what they are of is there, too."""


@dataclass(frozen=True)
class Fusing:
    """What a compiler fuses.

    With matmuls: `grows`: producers whose operands are larger than their result, in every dot that reads them;
    `epilogue`: elementwise consumers and reductions; `softmax`: what follows a reduction of the rows of a batch of
    products. `by_position`: what can be computed from an element's position is elementwise: random bits hash it, a
    scatter of one element per row compares it, and other scatters fill in a constant operand themselves. `tiles`:
    arrays lie in tiles, so that it matters which dimension comes last. `costly`: functions that are computed once, for
    all readers. `repeats`: these, too, are computed by every reader, gathers and windows included, if one is no loop
    and that moves no more bytes (`PriorityFusion` of XLA:GPU, which weighs time). `siblings`: equal constants are one
    array if one of them has to be in memory, and loops and reductions over as many elements that read that array are
    one kernel, as are reductions of any array (`MultiOutputFusion` of XLA:GPU). `accumulates`: a matmul adds its
    products to an argument (`xla.gemm_rewriter`). `updates_apart`: each result that a loop stacks is written by a
    kernel of its own (`xla.in_place_updates`). `cse`: elementwise ops that do what an earlier one does are computed
    once (`xla.cse`). `reads_host`: kernels read what is on the host where it is, through the link.
    """

    grows: bool = False
    epilogue: bool = False
    softmax: bool = False
    by_position: bool = False
    tiles: bool = False
    costly: frozenset[str] = _COSTLY
    repeats: bool = False
    siblings: bool = False
    accumulates: bool = False
    updates_apart: bool = False
    cse: bool = False
    reads_host: bool = False


@dataclass(frozen=True)
class Target:
    """What a compiler does besides its passes (`xla.pipelines`).

    **Fields**, of kernels: `fusing`; `library`: products, convolutions and attention that `kernels.cudnn` takes are
    calls of a library, and products deep and narrow are split (`xla.dots.split`); `lanes`: images lie with batch and
    features in tiles, for which convolutions are scheduled (`cost.products`); `vectors`: a batch of vectors times
    matrices is elementwise; `sweeps`: what passes over float32 values, or is a kernel of one instruction, takes longer
    than its bytes; `sorts`: rows are sorted before they are added to a table; `counter_kernel`: a loop counts its
    iterations in a kernel of their own.

    Of collectives: `combined`: the kinds of moves of which it makes one (`xla.collective_combiner`), `combined_bytes`:
    results of so many bytes at most (0: it combines none); `gathers_apart`: it gathers no result in the place of a
    donated argument (`cost.tasks`); `moves_casts`: it gathers fewer bytes where a cast can run after it or before
    (`xla.convert_mover`).

    Of buffers: `narrows`: float32 values that only bfloat16 is made of are bfloat16 (`xla.bf16_propagation`); `heap`,
    `packs`: how the most bytes are counted (`xla.buffer_assignment`).

    Of the order of instructions: `counts_results`: results count as memory; `pipelines_copies`: of what a loop copies
    to the host or from there, an iteration does not wait: the last copies to the host end behind the loop, and the
    first from there begin before it; else `copies_beside`: how many copies that a plan makes an iteration ahead run
    beside all kernels of a loop (the last ones; 2 as jaxlib 0.10.2 schedules layers of GPT for an H100).

    `kernels`: there are kernels for it (`unity_jax.kernels`).
    """

    fusing: Fusing = Fusing()
    library: bool = False
    lanes: bool = False
    vectors: bool = False
    sweeps: bool = False
    sorts: bool = False
    counter_kernel: bool = False
    combined: frozenset[str] = frozenset()
    combined_bytes: int = 0
    gathers_apart: bool = False
    moves_casts: bool = True
    narrows: bool = False
    heap: bool = False
    packs: bool = False
    counts_results: bool = False
    pipelines_copies: bool = False
    copies_beside: int = 0
    kernels: bool = False


TARGETS = {
    "cpu": Target(moves_casts=False),
    "gpu": Target(
        fusing=Fusing(repeats=True, siblings=True, accumulates=True, updates_apart=True, reads_host=True),
        library=True,
        combined=frozenset(["combine", "reduce", "reduce_scatter"]),
        combined_bytes=30 * 2**20 + 7,  # the default of `xla_gpu_all_reduce_combine_threshold_bytes` and its like
        counter_kernel=True,
        packs=True,
        counts_results=True,
        copies_beside=2,
        kernels=True,
    ),
    "tpu": Target(
        fusing=Fusing(
            grows=True,
            epilogue=True,
            softmax=True,
            by_position=True,
            tiles=True,
            costly=_COSTLY - ACTIVATIONS,
            cse=True,
        ),
        lanes=True,
        vectors=True,
        sweeps=True,
        sorts=True,
        combined=frozenset(["reduce"]),
        combined_bytes=2**27 - 1,  # it is seen to make all-reduces of up to 112 MiB, and to leave 128 MiB alone
        gathers_apart=True,
        narrows=True,
        heap=True,
        pipelines_copies=True,
        kernels=True,
    ),
}


def target_of(device: Device) -> Target:
    """What the compiler for a device does."""
    return TARGETS[device.compiler]
