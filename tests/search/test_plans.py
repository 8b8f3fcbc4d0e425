"""What good plans look like, for published models at published sizes, asserted on their structure."""

from __future__ import annotations

import pytest

from tests.search.planning import mesh, planner, program
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.search.candidate import Candidate, best, finish
from unity_jax.search.experts import Expert, expert_seeds

pytestmark = pytest.mark.slow  # the same numbers on every JAX version


def chosen(name: str, size: str, machine: str, limit: float | None = None, **overrides: int) -> tuple[Candidate, Graph]:
    plan = planner(program(name, size, **overrides), machine, limit)
    return best(plan.candidates(mesh(8)), plan.limit), plan.program.graph


def inputs(candidate: Candidate, pattern: str) -> list[Tensor]:
    found = [t for t in candidate.graph.inputs if pattern in t.name]
    assert found
    return found


def is_split(t: Tensor, dim: int | None = None) -> bool:
    assert t.layout is not None
    return any(t.layout.dims) if dim is None else bool(t.layout.dims[dim])


def fsdp(name: str, **overrides: int) -> Candidate:
    plan = planner(program(name, "tiny", **overrides), "h100:8")
    built = plan._builder(mesh(8)).build(keep=False)
    expert = Expert(("x",), shard_params=True, shard_state=True)
    (seed,) = expert_seeds(plan.program, built, mesh(8), plan.rules, [expert]).values()
    return finish(plan.program, built.decisions(seed, False), plan._builder(mesh(8)).resharder, plan.rules, "fsdp")


def test_bert_large_with_memory_is_data_parallel() -> None:
    """Every matmul of the layers works on its part of the batch with whole weights; stored state is sharded or not."""
    candidate, _ = chosen("bert", "full", "h100:8", layers=4)
    matmuls = [op for op in candidate.graph.ops if op.name == "dot_general" and not op.backward]
    layers = [op for op in matmuls if op.inputs[0].shape[:2] == (256, 512)]  # the others belong to the heads
    assert len(layers) == 4 * 8
    for op in layers:
        activation, weight = (t.layout for t in op.inputs)
        assert activation is not None
        assert weight is not None
        assert activation.dims[0] == ("x",)
        assert weight.is_replicated or op.inputs[1].shape[0] == 256  # attention's operands are both activations
    assert candidate.timeline.communication_seconds < 0.1 * candidate.seconds


def test_wide_mlp_at_small_batch_is_tensor_parallel() -> None:
    """Column, then row parallel: one reduction per pair of layers forward and one backward, and no weight moves."""
    candidate, _ = chosen("mlp", "full", "h100:8", batch_size=64)
    weights = inputs(candidate, ".params")
    assert len(weights) == 16
    assert all(is_split(w) for w in weights)
    moved = [op for op in candidate.graph.ops if op.move and op.move.kind != "partition"]
    size = max(w.nbytes for w in weights)
    assert all(op.inputs[0].nbytes < size for op in moved), "a weight or its gradient moves"
    rings = sum({"reduce": 2, "reduce_scatter": 1, "combine": 1}.get(op.move.kind, 0) for op in moved)
    assert rings <= 2 * 16 + 6, "an all-reduce is two rings: 8 pairs need one forward and one backward each"


def test_dlrm_tables_are_sharded_and_its_mlps_data_parallel() -> None:
    candidate, _ = chosen("dlrm", "full", "h100:8")
    tables = [t for t in inputs(candidate, ".params['tables']") if t.shape[0] > 100_000]
    assert tables
    assert all(is_split(t) for t in tables)
    for op in candidate.graph.ops:
        if (
            op.name == "dot_general" and not op.backward and op.inputs[1].rank == 2
        ):  # the MLPs; the interaction is batched
            assert op.inputs[0].layout is not None
            assert op.inputs[0].layout.dims[0] == ("x",), op.source


def test_gpt_at_a_tight_limit_shards_parameters_and_state() -> None:
    free, _ = chosen("gpt", "gpt2", "h100:8", batch_size=32)
    limit = 0.9 * free.memory.peak_bytes
    tight, _ = chosen("gpt", "gpt2", "h100:8", limit, batch_size=32)
    assert tight.fits(limit)
    large = [t for t in tight.graph.inputs if t.nbytes > 2**20 and t.name.startswith("[0]")]
    assert len(large) > 10
    assert sum(t.nbytes for t in large if is_split(t)) > 0.8 * sum(t.nbytes for t in large)
    assert all(is_split(t) for t in large if ".opt_state" in t.name)


def test_logits_of_a_sharded_vocabulary_are_never_gathered() -> None:
    """Under tensor parallelism the loss is computed from partial maxima and sums."""
    plan = planner(program("bert", "full", layers=1))
    built = plan._builder(mesh(8)).build(True)
    seeds = expert_seeds(plan.program, built, mesh(8), plan.rules)
    resharder = plan._builder(mesh(8)).resharder
    tp = finish(plan.program, built.decisions(seeds["tp(x)"], True), resharder, plan.rules, "tp")
    vocabulary = 30_522
    split = [
        t
        for op in tp.graph.ops
        for t in op.outputs
        if op.name == "dot_general" and t.shape[-1:] == (vocabulary,) and t.layout is not None and t.layout.dims[-1]
    ]
    assert split, "the vocabulary is not sharded in the tensor-parallel expert"
    for op in tp.graph.ops:
        if op.move and vocabulary in op.inputs[0].shape and op.inputs[0].rank > 2:
            assert op.move.kind == "partition", op.move


def test_fsdp_of_scanned_layers_gathers_one_layer_at_a_time() -> None:
    """Not the weights of all layers before the loop, which would take as much memory as having them whole."""
    candidate = fsdp("gpt", layers=4, hidden=128)
    stacks = {t.shape for t in inputs(candidate, ".params") if t.rank > 3 or t.shape[:1] == (4,)}
    gathers = [op for op in candidate.graph.walk() if op.move and op.move.kind == "combine"]
    assert stacks
    assert gathers
    assert not [op for op in gathers if op.outputs[0].shape in stacks and op.outputs[0].nbytes > 4096]


def test_fsdp_sums_the_moments_of_a_batch_norm_whole() -> None:
    """Both are needed everywhere: two all-reduces are one collective, an all-reduce and a reduce-scatter are not. The
    running moments are state, and sharded."""
    candidate = fsdp("resnext")
    moments = [
        op.move.kind
        for op in candidate.graph.walk()
        if op.move and not op.backward and op.inputs[0].rank == 1 and "reduce" in op.move.kind
    ]
    assert len(moments) > 10
    assert set(moments) == {"reduce"}
    assert all(is_split(t) for t in inputs(candidate, "['mean']"))
