"""Every strategy of attention as one op, executed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.kernels import attention, primitive
from unity_jax.kernels.spec import Operands, Spec
from unity_jax.ops.rules import rule_of

MESHES = ((2,), (4,), (2, 2))


def operands(batch, groups, heads, bias=False, mask=False, seeds=False):
    shape = batch, groups * heads, 6
    return Operands(
        arg(*shape, 4),
        arg(batch, groups, 5, 4),
        arg(batch, groups, 5, 3),
        arg(1, groups * heads, 6, 5) if bias else None,
        arg(batch, 1, 1, 5, dtype=np.bool_) if mask else None,
        arg(*shape[:2], 4, dtype=np.uint32, high=2**31) if seeds else None,
    )


@pytest.mark.parametrize("shape", [(4, 2, 1), (3, 1, 4), (2, 2, 2)])
@pytest.mark.parametrize("others", [{}, {"bias": True, "mask": True}, {"seeds": True}])
def test_both_passes(shape, others):
    x = operands(*shape, **others)
    spec = Spec(0.5, True, 0.8 if others.get("seeds") else 1.0)
    given = [t for t in x if t is not None]
    names = [of for of, t in zip(Operands._fields, x, strict=True) if t is not None]

    def both(cotangent, *flat):
        found = primitive.forward(spec, Operands(**dict(zip(names, flat, strict=True))))
        return found, primitive.backward(spec, Operands(**dict(zip(names, flat, strict=True))), found, cotangent)

    kinds = check_rule(both, arg(*x.q.shape[:3], 3), *given, only=("attention", "attention_back"), mesh_sizes=MESHES)
    assert all({"pass", "replicated"} <= kinds[op] for op in ("attention", "attention_back"))


def test_arithmetic_is_that_of_the_scores_that_are_seen():
    q, k = arg(2, 8, 4, 16), arg(2, 8, 2, 16)
    whole, causal = (ops_of(lambda q, k, c=c: attention(q, k, k, causal=c), q, k) for c in (False, True))
    flops = [next(rule_of(op).flops for op in ops if op.name == "attention") for ops in (whole, causal)]
    assert flops == [2 * 2 * 2 * 4 * 8 * 8 * 16, 2 * 2 * 2 * 4 * 36 * 16]


def test_heads_that_share_keys_are_not_split_backward():
    def gradient(q, k):
        return jax.grad(lambda k: jnp.sum(attention(q, k, k)))(k)

    ops = {op.name: op for op in ops_of(gradient, arg(2, 8, 4, 16), arg(2, 8, 2, 16))}
    assert str(rule_of(ops["attention"])).startswith("([b,gr,i,j], [b,g,k,l], [b,g,m,n]) -> ")
    assert [f.kind for f in rule_of(ops["attention_back"]).factors][:3] == ["pass", "pass", "replicate"]
