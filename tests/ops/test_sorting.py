"""Every strategy of sorts and selections, executed."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule

MESHES = ((2,), (3,), (2, 2))


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("sort", lambda x: lax.sort((x, jnp.flip(x), -x), dimension=1, num_keys=2)),
        ("sort", lambda x: jnp.sort(x, axis=0, descending=True)),
        ("sort", jnp.argsort),
        ("top_k", lambda x: lax.top_k(x, 2)),
        ("approx_top_k", lambda x: lax.approx_max_k(x, 2)),
        ("approx_top_k", lambda x: lax.approx_min_k(x, 2, reduction_dimension=0)),
    ],
)
def test_sorted_dimension_is_whole_and_others_pass(name, fn):
    for x in (arg(5, 6), arg(6, 5)):
        kinds = check_rule(fn, x, only=name, mesh_sizes=MESHES, exact=True)[name]
        assert kinds <= {"pass", "uneven", "replicated"}
        assert {"pass", "replicated"} <= kinds


def test_equal_keys_keep_their_order():
    x = arg(5, 8, dtype=np.int32, high=3)
    i = np.broadcast_to(np.arange(8, dtype=np.int32), x.shape)
    check_rule(lambda x, i: lax.sort((x, i), num_keys=1, is_stable=True), x, i, mesh_sizes=MESHES)
