"""Contention: the closed form by hand, rates that agree with it, and fits on pairs that predict fours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.validation.contention import evaluate, read
from unity_jax.machine.contention import A100, ASYNCHRONOUS, PERFECT, STREAMS, Contention, fit
from unity_jax.network.communication import KINDS

SHARED = Contention(0.5, 0.1, 0.25, 0.75, 0.125)
ALL = Contention(1, 1, 1, 1, 1)

parts = st.floats(0, 1)
contentions = st.builds(Contention, parts, parts, parts, parts, parts)
work = st.lists(st.just(0.0) | st.floats(0.01, 10), min_size=4, max_size=4)


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        ((8, 2, 1, 1), 8 + 0.5 * 2 + 0.1 * 2),  # bound by compute
        ((1, 8, 2, 2), 8 + 0.125 * 4),  # by the network
        ((1, 2, 8, 2), 8 + 0.25 * 2 + 0.75 * 2),  # by copies from the host
        ((1, 2, 2, 8), 8 + 0.25 * 2 + 0.75 * 2),  # by copies to the host
    ],
)
def test_the_busiest_resource_binds(alone, together):
    assert SHARED.seconds(*alone) == pytest.approx(together)
    assert PERFECT.seconds(*alone) == max(alone)
    assert ALL.seconds(*alone) == sum(alone)


def test_short_work_ends_early():
    assert SHARED.rates((9, 1, 0, 0)) == pytest.approx((0.5, 1, 0, 0))  # the collective takes half from the matmul
    assert SHARED.rates((9, 0, 0, 0)) == (1, 0, 0, 0)
    assert SHARED.rates((0, 0, 2, 1)) == pytest.approx((0, 0, 1 / 1.75, 1 / 1.75))
    assert ALL.rates((3, 1, 0, 0)) == pytest.approx((0, 1, 0, 0))


@given(contentions, work)
def test_streams_started_together_end_as_the_closed_form_says(contention, alone):
    uses = np.array([[1, a, b, b] for a, b in [(contention.compute_by_collectives, contention.compute_by_copies)]])
    now, left = 0.0, list(alone)
    while any(left):
        rates = contention.rates(left)
        assert uses @ rates <= 1 + 1e-9
        assert max(rates) <= 1 + 1e-9
        step = min(x / rate for x, rate in zip(left, rates, strict=True) if rate > 0)
        now += step
        left = [x - step * rate if x - step * rate > 1e-9 else 0.0 for x, rate in zip(left, rates, strict=True)]
    assert now == pytest.approx(contention.seconds(*alone), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("truth", [SHARED, A100], ids=["shared", "a100"])
def test_pairs_suffice_to_fit(truth):
    sizes = (1.0, 2.0, 5.0)
    alone = np.array(
        [
            [x if k == i else y if k == j else 0.0 for k in range(len(STREAMS))]
            for i, j in itertools.combinations(range(len(STREAMS)), 2)
            for x, y in itertools.product(sizes, sizes)
        ]
    )
    found = fit(alone, np.array([truth.seconds(*row) for row in alone]))
    for row in itertools.product(sizes, repeat=4):
        assert found.seconds(*row) == pytest.approx(truth.seconds(*row), rel=0.01)
    assert fit(alone, np.array([truth.seconds(*row) for row in alone])) == found


def test_fits_on_published_pairs_predict_published_fours():
    """Median over groups of GPUs of the median, and of the mean, of the errors of each group's four-way overlaps."""
    errors = [evaluate(*data) for data in read().values()]
    assert len(errors) == 25
    for middle in (np.median, np.mean):
        fitted, longest, summed = (
            np.median([middle(e) for e in found])
            for found in zip(*((e.fitted, e.longest, e.summed) for e in errors), strict=True)
        )
        assert fitted <= 0.04
        assert fitted < 0.15 * min(longest, summed)


def test_the_shipped_fit_is_that_of_the_experiment():
    found = evaluate(*read()["a100-sxm4-40gb", 1, 8]).contention
    for alone in itertools.product((0.5, 1, 2), repeat=4):
        assert A100.seconds(*alone) == pytest.approx(found.seconds(*alone), rel=1e-3)


def test_coefficients_are_parts():
    with pytest.raises(ValueError, match="between 0 and 1"):
        Contention(compute_by_copies=1.2)
    assert set(KINDS) == set(ASYNCHRONOUS)
