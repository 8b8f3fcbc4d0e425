"""Our rules against Shardy's, for every primitive that has both; the differences, each with its reason."""

import jax
import pytest

import unity_jax.ops  # noqa: F401 (fills the table of rules)
from tests.ops import shardy
from tests.ops.cases import CASES
from unity_jax import trace
from unity_jax.ops import linalg
from unity_jax.ops.rules import rule_of

_NO_OVERLAP = "Shards line up and no window crosses them: nothing is exchanged, so we call the dimension `pass`."
_UNALIGNED = "Shards of the image and of the result do not line up, so each device would need another shift: gathered."
_WINDOW = (
    "Shardy also offers to split the window itself, as the minor factor of the image dimension. We split only the "
    "major factor of a dimension, whose shards are contiguous, and keep windows, which are small, whole."
)
_NO_COLLECTIVE = "Shardy promises a reduction that no collective computes (XLA gathers); only sum, max and min reduce."
_SCAN = (
    "Shardy sees the window reduction that JAX lowers this to on CPU and calls the dimension a permutation; we "
    "accumulate along each shard, gather the totals, and call it `pass`."
)
_MOVED = "Elements change their device. Shardy leaves the moves to XLA; we gather the dimension first."
_COLUMNS = "Shardy knows the call of a library, whose rule shares the batch alone; each column is solved by itself."
_SEVERAL = "It is lowered to several ops, none of which has its shapes."

DIFFERENCES: dict[str, str] = {
    "ragged_dot_general": "On CPU it is lowered to a masked `dot_general`; ours is the rule of the op itself.",
    "conv_general_dilated:1x1": _NO_OVERLAP,
    "conv_general_dilated:valid": _UNALIGNED,
    "conv_general_dilated:strided": _WINDOW,
    "conv_general_dilated:patches": _NO_OVERLAP + " " + _WINDOW,
    "conv_general_dilated:kernel gradient, strided": _WINDOW,
    "reduce_prod": _NO_COLLECTIVE,
    "reduce_xor": _NO_COLLECTIVE,
    "reduce": _NO_COLLECTIVE,
    "argmax": _NO_COLLECTIVE,
    "argmin": _NO_COLLECTIVE,
    "cumsum": _SCAN,
    "cumprod": _SCAN,
    "cummax": _SCAN,
    "cummin": _SCAN,
    "cumlogsumexp": _SCAN,
    "reduce_window_max:no overlap": _NO_OVERLAP,
    "reduce_window_sum:valid": _UNALIGNED,
    "select_and_scatter_add": "JAX pads the image before it lowers the op, so Shardy sees one of another shape.",
    "select_and_scatter_add:no overlap": (
        "Shardy keeps the gradient of the windows whole; every window lies in one shard, so we split it along."
    ),
    "select_and_scatter_add:one window": "There is one window, which no two devices share.",
    "rev": _MOVED,
    "slice": _MOVED,
    "slice:strided": _MOVED,
    "pad": _MOVED,
    "reshape:not nested": "What does not nest moves between devices: Shardy leaves it to XLA, we gather it.",
    "dynamic_update_slice": "Each device writes what falls on its own rows, so nothing moves: `pass`.",
    "split": _SEVERAL,
    "stack": _SEVERAL,
    "unstack": _SEVERAL,
    "tile": _SEVERAL,
    "iota": "Shardy has no rules for ops without operands; each device counts from its own offset.",
    "cholesky_update": "Shardy finds one of the elementwise ops that it is lowered to; we keep the matrix whole.",
    "lu": _SEVERAL,
    "lu_pivots_to_permutation": _SEVERAL,
    "qr": _SEVERAL,
    "symmetric_product": _SEVERAL,
    "triangular_solve": _COLUMNS,
    "triangular_solve:right": _COLUMNS,
    "tridiagonal_solve": _COLUMNS,
    "scatter-sub": "Shardy knows no reduction for subtraction; partial results of zero minus updates just add up.",
    "scatter-mul": _NO_COLLECTIVE,
    "top_k": "Shardy has no rule for `chlo.top_k`.",
    "approx_top_k": "Shardy lets the searched dimension be split; the greatest of a part are not the result: gathered.",
}

MATRICES = {*linalg.FLOPS, "triangular_solve", "tridiagonal_solve"}
NEWER = {"dynamic_update_slice"}  # differs only in the Shardy of newer JAX versions


@pytest.mark.parametrize(("name", "fn", "args"), CASES, ids=[name for name, _, _ in CASES])
def test_rule_agrees_with_shardy(name, fn, args):
    primitive = name.split(":")[0]
    ops = [op for op in trace.build(jax.jit(fn).trace(*args).jaxpr).ops if op.name == primitive]
    assert ops, f"{name} does not trace to {primitive}"
    ours = shardy.our_rule(ops[-1], rule_of(ops[-1]))
    theirs = shardy.shardy_rule(fn, ops[-1], *args)
    if primitive in MATRICES and theirs is not None:
        # In the rules of calls of libraries a dimension of a matrix is a factor of its own, which means nothing.
        ours, theirs = shardy.linked(ours), shardy.linked(theirs)
    difference = shardy.difference(ours, theirs)
    if name in DIFFERENCES:
        assert difference or name in NEWER, f"{name} is listed as different and is not"
    else:
        assert not difference


def test_no_stale_differences():
    assert set(DIFFERENCES) <= {name for name, _, _ in CASES}
