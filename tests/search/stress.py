"""A transformer train step as a planning problem, without JAX: forward, backward, optimizer, on a small mesh.

    problem = transformer(layers=24, axes=(4, 4))

Each op is an einsum; a strategy gives every mesh axis to one of its factors or to none. Layers share their arrays.
"""

import functools
import itertools
from collections import defaultdict

import numpy as np

from unity_jax.search.problem import Edge, Problem, Shared, Usage

DIMS = {"b": 32, "s": 512, "t": 512, "d": 1024, "h": 16, "e": 64, "f": 4096, "v": 32768}
WEIGHTS = {"q": "dhe", "k": "dhe", "v": "dhe", "o": "hed", "f": "df", "g": "fd", "n1": "d", "n2": "d", "bf": "f"}
FLOPS, BANDWIDTH, NETWORK, LATENCY = 1e14, 1e12, 5e10, 5e-6


class Step:
    """Collects nodes and tensors; `problem()` closes the live ranges."""

    def __init__(self, axes):
        self.axes = axes
        self.unary, self.edges, self.names = [], [], []
        self.results = []  # per node: (dims, layout codes)
        self.uses = defaultdict(lambda: ([], []))  # producer -> forward and backward uses, (consumer, codes)
        self.backward = False
        self._interned = {}

    def once(self, key, make):
        if key not in self._interned:
            self._interned[key] = make()
        return self._interned[key]

    def op(self, factors, operands, result, flops=0.0, linear=False):
        """An einsum: `operands` are (node, dims); factors not in the result are sums."""
        states = (*factors, "-", *(("+",) if linear else ()))
        key = ("op", states, result, tuple(d for _, d in operands), flops)
        unary = self.once(key, lambda: self._time(states, [d for _, d in operands], result, flops))
        node = len(self.unary)
        self.unary.append(unary)
        self.results.append((result, self.codes(states, result, True)))
        for producer, dims in operands:
            if producer is not None:
                self.uses[producer][self.backward].append((node, self.codes(states, dims, linear)))
        return node

    def tie(self, i, j):
        """Two nodes of one shape must have one layout."""
        a, b = self.results[i][1], self.results[j][1]
        key = ("tie", id(a), id(b))
        self.edges.append(Edge(i, j, self.once(key, lambda: np.where(a[:, None] == b[None], 0.0, np.inf))))

    def codes(self, states, dims, partial):
        def make():
            base = len(dims) + 2
            place = {**{d: p for p, d in enumerate(dims)}, "-": len(dims), "+": len(dims) + 1}
            other = len(dims) + 1 if partial else len(dims)
            one = [place.get(s, other) for s in states]
            return np.array(
                [
                    functools.reduce(lambda n, s: n * base + s, c, 0)
                    for c in itertools.product(one, repeat=len(self.axes))
                ]
            )

        return self.once(("codes", states, dims, partial), make)

    def _time(self, states, operands, result, flops):
        times = []
        for choice in itertools.product(states, repeat=len(self.axes)):
            shards = np.prod([n for n, s in zip(self.axes, choice, strict=True) if s not in "-+"] or [1])
            size = sum(np.prod([float(DIMS[d]) for d in dims]) * 2 for dims in (*operands, result))
            times.append(flops / shards / FLOPS + size / shards / BANDWIDTH + 1e-6)
        return np.array(times)

    def reshard(self, dims):
        """(layouts, layouts) seconds, moved one axis after the other."""
        base, rank = len(dims) + 2, len(dims)
        size = np.prod([float(DIMS[d]) for d in dims]) * 2
        layouts = list(itertools.product(range(base), repeat=len(self.axes)))
        table = np.zeros((len(layouts),) * 2)
        for (i, a), (j, b) in itertools.product(enumerate(layouts), repeat=2):
            for axis, n in enumerate(self.axes):
                x, y = a[axis], b[axis]
                local = size / np.prod([m for o, m in enumerate(self.axes) if o != axis and a[o] < rank] or [1])
                moved = local * (n - 1) / n / NETWORK + LATENCY
                if x == y or (x == rank and y < rank):
                    continue
                if y == rank + 1:
                    table[i, j] = np.inf
                elif x == rank + 1:
                    table[i, j] += moved * (2 if y == rank else 1)
                else:
                    table[i, j] += moved if y == rank else moved / n
        return table

    def problem(self):
        shared, usage = [], []
        steps = len(self.unary)
        for node in range(steps):
            dims, source = self.results[node]
            last = node + 1
            for uses in self.uses[node]:
                if uses:
                    cost = self.once(("reshard", dims), lambda dims=dims: self.reshard(dims))
                    shared.append(Shared(node, tuple(c for c, _ in uses), source, tuple(t for _, t in uses), cost))
                    last = max(last, uses[-1][0] + 1)
            nbytes = self.once(("bytes", dims, id(source)), lambda d=dims, s=source: self._bytes(d, s))
            usage.append(Usage(node, nbytes, node, last))
        return Problem(self.unary, self.edges, shared, usage)

    def _bytes(self, dims, source):
        base, sizes = len(dims) + 2, []
        for code in source:
            shards = 1
            for n in reversed(self.axes):
                shards *= n if code % base < len(dims) else 1
                code //= base
            sizes.append(np.prod([float(DIMS[d]) for d in dims]) * 2 / shards)
        return np.array(sizes)


def transformer(layers=24, axes=(8,), extras=3):
    """About 93 nodes a layer. `extras` adds that many single-strategy constants per layer."""
    step = Step(tuple(axes))

    def param(dims):
        return step.op(tuple(d for d in dims if d != "e"), [], dims)

    def ein(factors, operands, result):
        flops = 2 * np.prod([float(DIMS[d]) for d in sorted({*factors, *result, *operands[0][1]})])
        return step.op(tuple(factors), operands, result, flops)

    def point(dims, operands, factors=None, linear=False):
        return step.op(tuple(factors or dims), operands, dims, 0.0, linear)

    mask = param("bt")
    embed = param("bsd")
    x, tape = embed, []
    for _ in range(layers):
        for _ in range(extras):
            _constant(step)
        w = {n: param(d) for n, d in WEIGHTS.items()}
        n1 = point("bsd", [(x, "bsd"), (w["n1"], "d")], "bs")
        q, k, v = (ein("bsdh", [(n1, "bsd"), (w[n], "dhe")], "bshe") for n in "qkv")
        k, v = point("bthe", [(k, "bthe")], "bth"), point("bthe", [(v, "bthe")], "bth")
        scores = ein("bhst", [(q, "bshe"), (k, "bthe")], "bhst")
        soft = point("bhst", [(scores, "bhst"), (mask, "bt")], "bhs")
        ctx = ein("bhst", [(soft, "bhst"), (v, "bthe")], "bshe")
        proj = ein("bsdh", [(ctx, "bshe"), (w["o"], "hed")], "bsd")
        x2 = point("bsd", [(x, "bsd"), (proj, "bsd")], linear=True)
        n2 = point("bsd", [(x2, "bsd"), (w["n2"], "d")], "bs")
        ff = ein("bsdf", [(n2, "bsd"), (w["f"], "df")], "bsf")
        gelu = point("bsf", [(ff, "bsf"), (w["bf"], "f")])
        gg = ein("bsdf", [(gelu, "bsf"), (w["g"], "fd")], "bsd")
        tape.append((w, x, n1, q, k, v, soft, ctx, x2, n2, ff, gelu))
        x = point("bsd", [(x2, "bsd"), (gg, "bsd")], linear=True)
    step.backward = True
    dx = point("bsd", [(x, "bsd")])
    grads = []
    for w, x, n1, q, k, v, soft, ctx, x2, n2, ff, gelu in reversed(tape):
        g = {}
        g["g"] = ein("bsdf", [(gelu, "bsf"), (dx, "bsd")], "fd")
        dgelu = ein("bsdf", [(dx, "bsd"), (w["g"], "fd")], "bsf")
        dff = point("bsf", [(dgelu, "bsf"), (ff, "bsf")])
        g["bf"] = ein("bsf", [(dff, "bsf")], "f")
        g["f"] = ein("bsdf", [(n2, "bsd"), (dff, "bsf")], "df")
        dn2 = ein("bsdf", [(dff, "bsf"), (w["f"], "df")], "bsd")
        g["n2"] = ein("bsd", [(dn2, "bsd"), (x2, "bsd")], "d")
        dl2 = point("bsd", [(dn2, "bsd"), (x2, "bsd"), (w["n2"], "d")], "bs")
        dx2 = point("bsd", [(dx, "bsd"), (dl2, "bsd")], linear=True)
        g["o"] = ein("bsdh", [(ctx, "bshe"), (dx2, "bsd")], "hed")
        dctx = ein("bsdh", [(dx2, "bsd"), (w["o"], "hed")], "bshe")
        dv = ein("bhst", [(soft, "bhst"), (dctx, "bshe")], "bthe")
        dsoft = ein("bhst", [(dctx, "bshe"), (v, "bthe")], "bhst")
        dscores = point("bhst", [(dsoft, "bhst"), (soft, "bhst")], "bhs")
        dq = ein("bhst", [(dscores, "bhst"), (k, "bthe")], "bshe")
        dk = ein("bhst", [(dscores, "bhst"), (q, "bshe")], "bthe")
        dk, dv = point("bshe", [(dk, "bshe")], "bsh"), point("bshe", [(dv, "bshe")], "bsh")
        dn1 = []
        for n, d in (("q", dq), ("k", dk), ("v", dv)):
            g[n] = ein("bsdh", [(n1, "bsd"), (d, "bshe")], "dhe")
            dn1.append(ein("bsdh", [(d, "bshe"), (w[n], "dhe")], "bsd"))
        a = point("bsd", [(dn1[0], "bsd"), (dn1[1], "bsd")], linear=True)
        a = point("bsd", [(a, "bsd"), (dn1[2], "bsd")], linear=True)
        g["n1"] = ein("bsd", [(a, "bsd"), (x, "bsd")], "d")
        dl1 = point("bsd", [(a, "bsd"), (x, "bsd"), (w["n1"], "d")], "bs")
        dx = point("bsd", [(dx2, "bsd"), (dl1, "bsd")], linear=True)
        grads.append((w, g))
    norm = step.op(("b",), [], "")  # the global norm: a scalar hub
    for w, g in grads:
        for n in g:
            dims = step.results[w[n]][0]
            square = ein(dims, [(g[n], dims)], "")
            step.uses[square][1].append((norm, step.codes(("b", "-"), "", False)))
            update = point(dims, [(g[n], dims), (w[n], dims)], tuple(d for d in dims if d != "e"))
            step.uses[norm][1].append((update, step.codes((*[d for d in dims if d != "e"], "-"), "", False)))
            for _ in range(2):
                moment = param(dims)
                step.tie(moment, update)
            step.tie(w[n], update)
    return step.problem()


def _constant(step):
    """A node with a single strategy, tied to nothing that matters."""
    node = len(step.unary)
    step.unary.append(step.once("constant", lambda: np.array([1e-6])))
    step.results.append(("bt", step.once("constant layout", lambda: np.array([_replicated(step, "bt")]))))
    return node


def _replicated(step, dims):
    return functools.reduce(lambda n, _: n * (len(dims) + 2) + len(dims), step.axes, 0)
