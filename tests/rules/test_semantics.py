"""The meaning of every op against numpy written out, and of rules by value and gradient."""

import dataclasses

import numpy as np
import pytest

from unity_jax.rewrite.meaning import FIELD, NUMBERS, PRIME, STEP, size
from unity_jax.rewrite.rule import make_rule, parse_dim, parse_term, parse_variable
from unity_jax.rules.semantics import agrees, draw, evaluate, passes, random_sizes

SIZES = {"m": 2, "k": 3, "n": 4, "o": 5, "p": 2, "v": 6, "e": 2, "h": 7, "r": 3}


def _same_conv(x, w):
    out = np.zeros((2, 7, 4), np.int64)
    around = np.pad(x, [(0, 0), (1, 1), (0, 0)])
    for r in range(3):
        out = (out + np.einsum("mhk,kn->mhn", around[:, r : r + 7] % 1000, w[r] % 1000)) % PRIME
    return out


def _put(u, i):
    out = np.zeros((6, 3), np.int64)
    np.add.at(out, i, u)
    return out % PRIME


CASES = [
    ("dot(x, w; k)", "x[m,k] w[k,n]", lambda x, w: x.astype(object) @ w.astype(object) % PRIME),
    ("dot(x, y)", "x[m,k] y[m,n]", lambda x, y: x[:, :, None] * y[:, None, :] % PRIME),
    ("conv(x, w; k, h, r)", "x[m,h,k] w[r,k,n]", lambda x, w: _same_conv(x, w)),
    ("add(x, y)", "x[m,k] y[k]", lambda x, y: (x + y) % PRIME),
    ("sub(x, y)", "x[m] y[k]", lambda x, y: (x[:, None] - y) % PRIME),
    ("mul(x, y)", "x[m,k] y[m]", lambda x, y: x * y[:, None] % PRIME),
    ("neg(x)", "x[m]", lambda x: -x % PRIME),
    ("sum(x; m, n)", "x[m,k,n]", lambda x: x.sum((0, 2)) % PRIME),
    ("broadcast(x; n)", "x[m]", lambda x: np.stack([x] * 4, 1)),
    ("transpose(x; n, m)", "x[m,n]", lambda x: x.T),
    ("concat(x, y; n+o)", "x[m,n] y[o,m]", lambda x, y: np.concatenate([x, y.T], 1)),
    ("slice(x; n+o, 1)", "x[m,n+o]", lambda x: x[:, 4:]),
    ("pad(x; n+o, 1)", "x[m,o]", lambda x: np.pad(x, [(0, 0), (4, 0)])),
    ("stack(x, y; e)", "x[m,n] y[n,m]", lambda x, y: np.stack([x, y.T])),
    ("unstack(x; e, 1)", "x[m,e]", lambda x: x[:, 1]),
    ("split(x; p*n)", "x[m,p*n]", lambda x: x.reshape(2, 2, 4)),
    ("merge(x; p*n)", "x[n,m,p]", lambda x: x.transpose(2, 0, 1).reshape(8, 2)),
    ("take(x, i)", "x[v,k] i[n]<v", lambda x, i: x[i]),
    ("take(x, i)", "x[n,v] i[n]<v", lambda x, i: x[np.arange(4), i]),
    ("put(u, i; n)", "u[n,k] i[n]<v", lambda u, i: _put(u, i).T),
    ("scatter(t, u, i; n)", "t[v,k] u[n,k] i[n]<v", lambda t, u, i: (t + _put(u, i)) % PRIME),
    ("partition(x; p*n)", "x[m,p*n]", lambda x: x.reshape(2, 2, 4).transpose(1, 0, 2)),
    ("combine(x; p*n)", "x[m,n]@p", lambda x: x.transpose(1, 0, 2).reshape(2, 8)),
    ("replicate(x; p)", "x[m]", lambda x: np.stack([x, x])),
    ("reduce(x; p)", "x[m]@p", lambda x: x.sum(0) % PRIME),
    ("dot(x, w; k)", "x[m,k]@p w[k,n]@p", lambda x, w: x.astype(object) @ w.astype(object) % PRIME),
]


def _values(inputs, numbers=FIELD):
    variables = [parse_variable(v) for v in inputs.split()]
    return variables, draw(variables, SIZES, np.random.default_rng(0), numbers)


@pytest.mark.parametrize(("text", "inputs", "expected"), CASES)
def test_ops_are_numpy_s(text, inputs, expected):
    variables, values = _values(inputs)
    if text.startswith("conv"):
        values = {name: value % 1000 for name, value in values.items()}
    term = parse_term(text, {v.name: v for v in variables})
    (found,) = evaluate([term], SIZES, values)
    wanted = expected(*(values[v.name] for v in variables))
    axes = {"put": (1, 0)}.get(term.op, range(found.ndim))
    np.testing.assert_array_equal(found.transpose(*axes) if found.shape != wanted.shape else found, wanted)


def test_unknown_functions_are_functions_of_their_arguments_alone():
    variables, values = _values("x[m,k] y[m,k]")
    known = {v.name: v for v in variables}
    texts = ("f(x)", "g(x)", "h(x, y)", "h(y, x)", "fold(x; k)", "convert(x)")
    f, g, h, back, fold, turned = evaluate([parse_term(t, known) for t in texts], SIZES, values)
    assert len({f.tobytes(), g.tobytes(), turned.tobytes()}) == 3
    assert (h != back).all()
    shuffled = {"x": values["x"][:, ::-1], "y": values["y"]}
    f2, fold2 = evaluate([parse_term(t, known) for t in ("f(x)", "fold(x; k)")], SIZES, shuffled)
    np.testing.assert_array_equal(f2, f[:, ::-1])
    np.testing.assert_array_equal(fold2, fold)


def test_gradients_are_jax_s():
    import jax
    import jax.numpy as jnp

    variables, values = _values("x[m,k] w[k,n]", NUMBERS)
    term = parse_term("fold(f(dot(x, w; k)); n)", {v.name: v for v in variables})
    (found,) = evaluate([term], SIZES, values, NUMBERS)
    points = tuple(values[n].real for n in "xw")
    directions = tuple(values[n].imag / STEP for n in "xw")
    function = lambda x, w: jax.nn.logsumexp(jnp.tanh(x @ w), axis=-1)  # noqa: E731
    value, derivative = jax.jvp(function, points, directions)
    np.testing.assert_allclose(found.real, value, rtol=1e-5)
    np.testing.assert_allclose(found.imag / STEP, derivative, rtol=1e-4, atol=1e-5)


def test_rules_that_hold_and_rules_that_do_not():
    given = ["x[m,p*k]", "w[p*k,n]"]
    cut = "dot(partition(x; p*k), partition(w; p*k); k)"
    assert passes(make_rule("", given, ["dot(x, w; p*k)"], [f"reduce({cut}; p)"]))
    assert not passes(make_rule("", given, ["f(dot(x, w; p*k))"], [f"reduce(f({cut}); p)"]))


def test_gradients_are_compared():
    """Two functions of one value and two derivatives, as `stop_gradient` would make."""
    still = dataclasses.replace(NUMBERS, unary=(lambda x: x, lambda x: x.real + 0j))
    rule = make_rule("", ["x[m]"], ["f(x)"], ["g(x)"])
    assert not agrees(rule, {"m": 2}, np.random.default_rng(0), still)


def test_random_sizes_satisfy_a_rule():
    rule = make_rule("", ["x[n]", "z[o]"], ["mul(x, z)"], ["mul(z, x)"], when=["n == o"])
    stacked = make_rule("", ["x[n]", "y[n]"], ["unstack(stack(x, y; e); e, 1)"], ["y"])
    rng = np.random.default_rng(0)
    assert all(s["o"] == s["n"] for s in (random_sizes(rule, rng) for _ in range(9)))
    assert all(random_sizes(stacked, rng)["e"] == 2 for _ in range(9))


def test_sums_and_multiples_have_sizes():
    assert size(parse_dim("p*(n+o)"), SIZES) == 18
