"""Every strategy of convolutions and of both their gradients, executed."""

import jax
import numpy as np
import pytest
from jax import lax

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.ops.rule import InnerCollective, Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.mesh import MeshAxes

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}


def conv(nd=1, stride=1, padding="SAME", groups=1, dilation=1, image_dilation=1, layouts=None):
    """A convolution, its result and both gradients as one traced function."""

    def fn(x, k):
        return lax.conv_general_dilated(
            x,
            k,
            (stride,) * nd,
            [padding] * nd if isinstance(padding, tuple) else padding,
            lhs_dilation=(image_dilation,) * nd,
            rhs_dilation=(dilation,) * nd,
            dimension_numbers=layouts or LAYOUTS[nd],
            feature_group_count=groups,
        )

    return jax.grad(lambda x, k: (fn(x, k) ** 2).sum(), (0, 1))


def check(fn, image, kernel, meshes=((2,), (4,), (2, 2))):
    kinds = check_rule(fn, arg(*image), arg(*kernel), only="conv_general_dilated", mesh_sizes=meshes)
    return kinds["conv_general_dilated"]


@pytest.mark.parametrize(
    ("options", "width", "window", "halo"),
    [
        ({}, 16, 3, True),
        ({}, 16, 4, True),  # borrows more from one side
        ({}, 16, 5, True),  # the halo is all of a four-way shard's neighbour and more for 16 / 8
        ({}, 15, 3, False),  # does not divide
        ({}, 16, 1, False),
        ({}, 5, 1, False),  # a window of one may be split unevenly
        ({"padding": "VALID"}, 16, 3, False),
        ({"padding": (2, 0)}, 16, 3, True),  # causal
        ({"padding": (3, 3)}, 16, 3, False),
        ({"stride": 2}, 16, 3, True),
        ({"stride": 2, "padding": (1, 1)}, 16, 3, True),
        ({"stride": 2, "padding": (3, 3)}, 16, 7, True),  # the first layer of a ResNet
        ({"stride": 2}, 16, 1, False),
        ({"stride": 4, "padding": "VALID"}, 16, 4, False),  # patches
        ({"stride": 4, "padding": "VALID"}, 12, 4, False),  # a window that is larger than the result
        ({"dilation": 2}, 16, 3, True),
        ({"dilation": 3, "stride": 2}, 16, 3, True),
        ({"image_dilation": 2, "padding": (1, 2)}, 16, 3, True),  # transposed
    ],
)
def test_spatial_dimension(options, width, window, halo):
    kinds = check(conv(**options), (2, width, 2), (window, 2, 2), ((2,), (4,)))
    assert {"pass", "sum", "linear", "replicated"} <= kinds
    assert ("halo" in kinds) == halo


@pytest.mark.parametrize(
    ("groups", "features", "out", "batch"),
    [(1, 4, 6, 4), (1, 3, 5, 3), (2, 4, 8, 2), (4, 4, 8, 3), (4, 8, 4, 2), (3, 3, 3, 2)],
)
def test_batch_and_features(groups, features, out, batch):
    fn = conv(groups=groups, padding="VALID")
    kinds = check(fn, (batch, 3, features), (2, features // groups, out), ((2,), (4,), (2, 2)))
    assert "linear" in kinds


def test_what_is_not_split_keeps_its_padding():
    """XLA:GPU makes an array of its own of images that are padded more on one side, or cut."""
    for width, window, pad in ((14, 3, (1, 1)), (14, 1, (0, 0))):
        fn = conv(stride=2, padding=pad)
        for op in ops_of(fn, arg(4, width, 3), arg(window, 3, 2)):
            if op.name == "conv_general_dilated":
                shard = Shard(op, rule_of(op), MeshAxes(("x",), (2,)), (-1,))
                local = jax.make_jaxpr(lambda *xs, s=shard: s.rule.local(s, *xs))(*(arg(*t.shape) for t in op.inputs))
                assert local.eqns[-1].params["padding"] == op.params["padding"]


def test_two_spatial_dimensions():
    kinds = check(conv(2), (1, 8, 8, 1), (3, 3, 1, 2), ((2, 2),))
    assert {"pass", "sum", "halo", "linear"} <= kinds


def test_other_layouts():
    check(conv(2, stride=2, layouts=("NCHW", "OIHW", "NCHW")), (2, 2, 8, 4), (2, 2, 3, 3), ((2,),))


def test_kernel_gradient_sums_over_a_split_image():
    ops = ops_of(conv(), arg(2, 16, 3), arg(3, 3, 5))
    *_, op = (op for op in ops if op.name == "conv_general_dilated" and op.outputs[0].shape == (3, 3, 5))
    rule = rule_of(op)
    (image,) = [i for i, f in enumerate(rule.factors) if f.halo]
    assert rule.factors[image].kind == "sum"
    shard = Shard(op, rule, MeshAxes(("x",), (4,)), (image,))
    column = 2 * 3 * 8  # one column of the image: batch times features, in float64
    assert rule.inner(shard) == [InnerCollective("permute", ("x",), column)] * 2


def test_flops():
    def forward(x, k):
        return lax.conv_general_dilated(x, k, (2,), "SAME", dimension_numbers=LAYOUTS[1])

    (op,) = ops_of(forward, arg(2, 16, 3), arg(5, 3, 4))
    flops = 2 * (2 * 8 * 4) * (5 * 3)
    assert rule_of(op).flops == flops
    ops = [op for op in ops_of(conv(stride=2), arg(2, 16, 3), arg(5, 3, 4)) if op.name == "conv_general_dilated"]
    np.testing.assert_allclose([rule_of(op).flops for op in ops], flops)
