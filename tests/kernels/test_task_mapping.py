"""The algebra of task mappings, and the programs of a grid that they are."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unity_jax.kernels.task_mapping import auto_map, repeat, spatial


@st.composite
def parts(draw, dims):
    shape = draw(st.tuples(*[st.integers(1, 3 if dims == 1 else 2)] * dims))
    return draw(st.sampled_from((spatial, repeat)))(*shape, order=draw(st.permutations(range(dims))))


@st.composite
def mappings(draw, count, dims=None):
    """So many mappings of as many dimensions, of up to two parts each: all together they have few tasks."""
    dims = dims or draw(st.integers(1, 2))
    return [math.prod(draw(st.lists(parts(dims), max_size=1)), start=draw(parts(dims))) for _ in range(count)]


def every_task(mapping):
    return [mapping(w) for w in range(mapping.workers)]


@given(mappings(3))
def test_composition_is_associative(found):
    a, b, c = found
    assert every_task((a * b) * c) == every_task(a * (b * c))


@given(mappings(2))
def test_composition_is_by_its_definition(found):
    outer, inner = found
    both = outer * inner
    assert both.shape == tuple(n * m for n, m in zip(outer.shape, inner.shape, strict=True))
    assert both.workers == outer.workers * inner.workers
    for w in range(both.workers):
        tasks = itertools.product(outer(w // inner.workers), inner(w % inner.workers))
        assert both(w) == [tuple(t * n + s for t, n, s in zip(a, inner.shape, b, strict=True)) for a, b in tasks]


@given(mappings(1))
def test_every_task_is_done_once(found):
    (mapping,) = found
    done = [task for tasks in every_task(mapping) for task in tasks]
    assert sorted(done) == list(itertools.product(*map(range, mapping.shape)))


@given(mappings(1), st.booleans())
def test_a_grid_of_one_task_changes_nothing(found, is_spatial):
    (mapping,) = found
    one = (spatial if is_spatial else repeat)(*[1] * len(mapping.shape))
    assert every_task(one * mapping) == every_task(mapping) == every_task(mapping * one)


@given(st.integers(1, 6), st.integers(1, 6))
def test_equal_kinds_of_one_dimension_are_one(n, m):
    for of in (spatial, repeat):
        assert every_task(of(n) * of(m)) == every_task(of(n * m))


@given(mappings(1))
def test_programs_of_a_grid_are_the_workers(found):
    """And what they repeat lies at the strides of the loops, counted from their first tasks."""
    (mapping,) = found
    programs = list(itertools.product(*map(range, mapping.grid)))
    assert len(programs) == mapping.workers
    for w, program in enumerate(programs):
        first, tasks = mapping.first(program), []
        for at in itertools.product(*(range(loop.size) for loop in mapping.loops)):
            task = list(first)
            for i, loop in zip(at, mapping.loops, strict=True):
                task[loop.dim] += i * loop.stride
            tasks.append(tuple(task))
        assert tasks == mapping(w)


def test_examples_of_hidet():
    mapping = repeat(4, 1) * spatial(16, 8)  # of the paper: 64 x 8 tasks for 128 threads
    assert mapping.shape == (64, 8) and mapping.workers == 128
    assert mapping(9) == [(1, 1), (17, 1), (33, 1), (49, 1)]
    assert str(auto_map(8, 96, workers=64)) == "repeat(4, 3) * spatial(2, 32)"
    assert str(auto_map(8, 16, 24, workers=32)) == "repeat(8, 4, 3) * spatial(1, 4, 8)"
    matmul = spatial(4, 2) * repeat(2, 2) * spatial(4, 8) * repeat(4, 4)  # 128 x 128 by 256 threads
    assert matmul.shape == (128, 128) and matmul.workers == 256 and len(matmul(0)) == 64


@given(mappings(1, dims=2), st.integers(1, 12))
def test_what_is_shared_out_automatically_is_whole(found, workers):
    (shape,) = (m.shape for m in found)
    try:
        mapping = auto_map(*shape, workers=workers)
    except ValueError as error:
        assert f"no {workers} equal parts" in str(error) and math.prod(shape) % workers
    else:
        assert mapping.shape == shape and mapping.workers == workers


def test_what_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match="has 1 dimensions"):
        spatial(2) * repeat(2, 2)
    with pytest.raises(ValueError, match="each dimension once"):
        spatial(2, 2, order=(0, 0))
    with pytest.raises(ValueError, match="sizes from 1"):
        repeat(0)
    with pytest.raises(ValueError, match="worker 4 of 4"):
        spatial(4)(4)
