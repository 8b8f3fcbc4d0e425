"""What graphs are made of: an alphabet of inputs, dimensions and ops.

All graphs of up to three ops over all ops at once are too many, and nearly all of them mix ops that have nothing to
say to each other. So there is an alphabet for each set of ops that may interact, with inputs whose types let every op
apply in every way that matters: operands of equal and of different types (`x` and `y`, `v` and `w`), dimensions that
only one operand has, that two share and that all share, sums and multiples where something is concatenated or cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity_jax.rewrite.language import Attrs, Dim, Term, Type
from unity_jax.rewrite.rule import parse_dim, parse_variable


POINTWISE = frozenset("add sub mul h".split())


@dataclass(frozen=True)
class Alphabet:
    """`inputs` with their types, `ops`, and what attributes may name: `sums` and `multiples` to cut and to join,
    `new` dimensions to broadcast to or to stack along, `devices`.

    All graphs of up to `size` ops; beyond, if `outer` is not empty, graphs of one op more whose outermost op is one of
    these. No value has more than `rank` dimensions. One operand of a pointwise op has all dimensions of the other, unless
    the alphabet is `wide`.
    """

    name: str
    inputs: str
    ops: str
    sums: str = ""
    multiples: str = ""
    new: str = ""
    devices: str = ""
    size: int = 3
    outer: str = ""
    rank: int = 3
    wide: bool = False

    @property
    def variables(self) -> tuple[Term, ...]:
        return tuple(parse_variable(v) for v in self.inputs.split())

    def attributes(self, op: str, types: Sequence[Type]) -> Iterator[Attrs]:
        """The attributes that `op` may have with operands of these types; some do not fit."""
        x = types[0]
        if op == "dot":
            yield from _subsets([d for d in x.dims if d in types[1].dims], least=0)
        elif op == "conv":
            yield from ((c, Dim("h"), Dim("r")) for c in x.dims if c in types[1].dims)
        elif op in ("sum", "fold"):
            yield from _subsets(x.dims, most=2)
        elif op in ("put", "scatter"):
            yield from _subsets(types[-1].dims)
        elif op == "transpose":
            yield from [x.dims[::-1]] if len(x.dims) > 1 else []
        elif op in ("broadcast", "stack"):
            yield from ((d,) for d in _dims(self.new))
        elif op == "unstack":
            yield from ((d, i) for d in _dims(self.new) for i in (0, 1))
        elif op in ("slice", "pad"):
            yield from ((d, i) for d in _dims(self.sums) for i in range(len(d.parts)))
        elif op in ("replicate", "reduce"):
            yield from ((p,) for p in _dims(self.devices))
        elif op == "concat":
            yield from ((d,) for d in _dims(self.sums))
        elif op in ("split", "merge", "partition", "combine"):
            yield from ((d,) for d in _dims(self.multiples))
        elif self.wide or len(types) < 2 or op not in POINTWISE or _nested(types):
            yield ()


def _nested(types: Sequence[Type]) -> bool:
    a, b = (set(t.dims) for t in types)
    return a <= b or b <= a


def _each(name: str, inputs: str, ops: str, computing: str, **rest: object) -> list[Alphabet]:
    """One alphabet for each op that computes."""
    return [Alphabet(f"{name} {op}", inputs, f"{ops} {op}", **rest) for op in computing.split()]  # type: ignore[arg-type]


CAT, STACK, BLOCKS, ROWS, DEVICES = (
    "concat slice pad",
    "stack unstack",
    "split merge",
    "take put",
    "partition combine replicate reduce",
)
UNARY, BINARY = "f convert neg", "h add sub mul"

ALPHABETS = (
    # Arithmetic
    Alphabet("arithmetic", "x[m,j] y[n,j] z[o,j]", "add sub mul neg", wide=True),
    Alphabet("dots", "x[m,k,b,j,t] w[n,k,b,l,t] u[o,l,j,t]", "dot", size=2, rank=8),
    *_each("sums of dots", "x[m,k] y[q,k] w[n,k]", "dot", "add sub neg", wide=True),
    Alphabet("products", "x[m,k,j] w[n,k,j]", "dot mul sum broadcast", new="q", rank=5),
    *_each("sums", "x[m,k] y[n,k] z[m]", "sum broadcast", "add sub neg mul", new="q", wide=True),
    *_each("reductions", "x[m,k] z[n]", "sum fold broadcast transpose", "f convert h dot", new="q"),
    # Parts of a sum
    Alphabet("parts", "u[n+o] x[n] y[o]", f"{CAT} add", sums="n+o"),
    *_each("parts", "u[n+o] x[n] y[o]", CAT, UNARY, sums="n+o"),
    *_each("parts", "u[m,n+o] v[q,n+o] x[m,n] a[q,n] y[m,o] b[q,o] z[m]", CAT, BINARY, sums="n+o", wide=True),
    *_each("parts", "u[m,n+o] x[m,n] y[m,o]", CAT, "sum fold broadcast transpose", sums="n+o", new="q"),
    Alphabet("parts free dot", "u[m+o,q,k] x[m,q,k] y[o,q,k] w[n,k]", f"{CAT} dot", sums="m+o"),
    Alphabet(
        "parts contracted dot",
        "u[m,k+l,j] x[m,k,j] y[m,l,j] t[n,k+l,j] v[n,k,j] w[n,l,j]",
        f"{CAT} dot add",
        sums="k+l",
    ),
    Alphabet("parts batch dot", "u[m,n+o,k] x[m,n,k] y[m,o,k] t[q,n+o,k] v[q,n,k] w[q,o,k]", f"{CAT} dot", sums="n+o"),
    # Blocks of a multiple
    *_each("blocks", "u[p*n] x[p,n]", BLOCKS, UNARY, multiples="p*n"),
    *_each("blocks", "u[m,p*n] v[q,p*n] x[m,p,n] y[q,p,n] z[m]", BLOCKS, BINARY, multiples="p*n", rank=4, wide=True),
    *_each("blocks", "u[m,p*n] x[m,p,n]", BLOCKS, "sum fold broadcast transpose", multiples="p*n", new="q", rank=4),
    Alphabet("blocks dot", "u[m,p*n,k] x[m,p,n,k] v[q,p*n,k] y[q,p,n,k] w[q,k]", f"{BLOCKS} dot", multiples="p*n", rank=5),
    # Stacks
    *_each("stacks", "u[e,m] x[m] y[m]", STACK, UNARY, new="e"),
    *_each("stacks", "u[e,m] v[e,q] x[m] y[m] a[q] b[q]", STACK, BINARY, new="e", wide=True),
    *_each("stacks", "u[e,m,k] x[m,k] y[m,k]", STACK, "sum fold transpose", new="e"),
    Alphabet("stacks dot", "u[e,m,k] v[e,q,k] x[m,k] y[m,k] a[q,k] b[q,k]", f"{STACK} dot add", new="e", rank=4),
    # Rows by number
    *_each("rows", "t[v,d] i[n]<v u[n,d]", ROWS, UNARY),
    *_each("rows", "t[v,d] s[v,q] i[n]<v u[n,d] a[n,q] c[d]", f"{ROWS} scatter", BINARY, wide=True),
    *_each("rows", "t[v,d] i[n]<v u[n,d]", ROWS, "sum fold broadcast transpose", new="q"),
    Alphabet("rows dot", "t[v,d] s[v,o] i[n]<v u[n,d] w[d,o]", f"{ROWS} dot"),
    Alphabet("rows of rows", "t[v,d] i[n]<v j[q]<n u[q,d]", f"{ROWS} add"),
    # Devices
    *_each("devices", "x[p*k] a[k]@p b[k]", DEVICES, UNARY, multiples="p*k", devices="p"),
    *_each("devices", "x[m,p*k] y[q,p*k] a[m,k]@p b[q,k]@p c[m] d[q]", DEVICES, BINARY, multiples="p*k", devices="p", wide=True),
    *_each("devices", "x[m,p*k] a[m,k]@p", DEVICES, "sum fold broadcast transpose", multiples="p*k", devices="p", new="q", outer="reduce combine"),
    Alphabet("devices free dot", "x[p*m,q,k] a[m,q,k]@p w[n,k] b[n,k]@p", f"{DEVICES} dot", multiples="p*m", devices="p", outer="reduce combine"),
    Alphabet("devices contracted dot", "x[m,p*k,j] a[m,k,j]@p w[n,p*k,j] b[n,k,j]@p", f"{DEVICES} dot", multiples="p*k", devices="p", outer="reduce combine"),
    # Convolutions
    Alphabet("convolutions", "x[b,h,c] y[b,h,c] w[r,c,n] v[r,c,n] z[]", "conv add sub neg mul", rank=4),
    Alphabet("convolutions and dots", "x[b,h,c] w[r,c,n] u[n,o] v[c,d]", "conv dot sum", rank=4),
    Alphabet("convolutions of parts", "u[b+a,h,c] x[b,h,c] y[a,h,c] w[r,c,n] v[r,c,o] s[r,c,n+o]", f"{CAT} conv", sums="b+a n+o", rank=4),
    Alphabet("convolutions over parts", "u[b,h,c+d] x[b,h,c] y[b,h,d] s[r,c+d,n] w[r,c,n] v[r,d,n]", f"{CAT} conv add", sums="c+d", rank=4),
    Alphabet("convolutions on devices", "x[p*b,h,c] a[b,h,c]@p w[r,c,p*n] v[r,c,n]@p", f"{DEVICES} conv", multiples="p*b p*n", devices="p", outer="reduce combine", rank=4),
    Alphabet("convolutions over devices", "x[b,h,p*c] a[b,h,c]@p w[r,p*c,n] v[r,c,n]@p", f"{DEVICES} conv", multiples="p*c", devices="p", outer="reduce combine", rank=4),
    # Ways to cut and join among themselves
    Alphabet("parts and blocks", "u[n+o,p*k] x[n,p*k] y[o,p*k] s[n+o,p,k]", f"{CAT} {BLOCKS}", sums="n+o", multiples="p*k"),
    Alphabet("parts and stacks", "u[e,n+o] s[n+o] t[n+o] x[n] y[o]", f"{CAT} {STACK}", sums="n+o", new="e"),
    Alphabet("parts and rows", "t[v,n+o] i[m]<v u[m,n+o] x[v,n] y[v,o]", f"{CAT} {ROWS}", sums="n+o"),
    Alphabet("parts of rows", "t[v,d] i[n]<v j[o]<v k[n+o]<v u[n,d] w[o,d] s[n+o,d]", f"concat slice {ROWS} add", sums="n+o"),
    Alphabet("parts and devices", "u[n+o,p*k] x[n,k]@p y[o,k]@p z[n] w[o]", f"{CAT} {DEVICES}", sums="n+o", multiples="p*k", devices="p"),
    Alphabet("blocks and stacks", "u[e,p*k] x[p*k] y[p*k] s[p,k]", f"{BLOCKS} {STACK}", multiples="p*k", new="e"),
    Alphabet("blocks and rows", "t[v,p*k] i[m]<v u[m,p*k] s[v,p,k]", f"{BLOCKS} {ROWS}", multiples="p*k"),
    Alphabet("blocks of rows", "t[v,d] i[p*n]<v u[p*n,d] j[p,n]<v", f"{BLOCKS} {ROWS}", multiples="p*n"),
    Alphabet("blocks and devices", "u[q*n,p*k] x[q,n,p*k] y[q*n,k]@p", f"{BLOCKS} {DEVICES}", multiples="q*n p*k", devices="p", rank=4),
    Alphabet("stacks and rows", "t[v,d] s[v,d] i[n]<v j[n]<v u[n,d] w[n,d]", f"{STACK} {ROWS} add", new="e"),
    Alphabet("stacks and devices", "u[e,p*k] x[p*k] y[p*k] a[k]@p b[k]@p", f"{STACK} {DEVICES}", multiples="p*k", new="e", devices="p"),
    Alphabet("rows and devices", "t[v,p*d] i[n]<v u[n,p*d] s[v,d]@p", f"{ROWS} {DEVICES}", multiples="p*d", devices="p"),
    Alphabet("rows of devices", "t[v,d] i[p*n]<v j[n]<v@p u[p*n,d]", f"{ROWS} {DEVICES}", multiples="p*n", devices="p", outer="reduce combine"),
    Alphabet("devices and devices", "x[p*m,q*k] a[m,k]@p@q b[m,q*k]@p", DEVICES, multiples="p*m q*k", devices="p q"),
)


def _dims(text: str) -> list[Dim]:
    return [parse_dim(d) for d in text.split()]


def _subsets(dims: Sequence[Dim], least: int = 1, most: int | None = None) -> Iterator[Attrs]:
    for n in range(least, min(len(dims), len(dims) if most is None else most) + 1):
        yield from itertools.combinations(dims, n)
