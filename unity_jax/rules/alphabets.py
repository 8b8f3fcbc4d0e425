"""The alphabets that the library is made from."""

from __future__ import annotations

from unity_jax.rules.alphabet import Alphabet


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
UNARY, BINARY, SHAPING = "f convert neg", "h add mul", "sum fold broadcast transpose"
ROWS_OF_TWO = "t[v,d,b,g] s[v,q,b] i[n,l,g]<v u[n,l,g,d,b] a[n,q,b]"
SPMD = "reduce combine"

ALPHABETS = (
    # Arithmetic: a dimension for each set of inputs that may share it
    Alphabet("differences", "x[m,a] y[a]", "add sub neg"),
    Alphabet("arithmetic", "x[m,a,b] y[n,a,c] z[o,b,c]", "add sub mul neg", rank=6, wide=True),
    Alphabet("dots", "x[m,k,b,j,c,t] w[n,k,b,l,a,t] u[o,l,a,j,c,t]", "dot", size=2, rank=10, over="a b c t"),
    *_each("dots", "x[m,a,b,k] y[q,a,c,k] w[n,b,c,k]", "dot", "add neg mul", over="k", rank=7, wide=True),
    *_each(
        "reductions",
        "x[m,k] y[n,k] z[o] s[r,q]",
        "sum broadcast",
        "add mul neg",
        over="k q",
        new="q",
        wide=True,
        rank=5,
    ),
    Alphabet("reductions of dots", "x[m,k,j] w[n,k,j] s[r,q]", "dot sum broadcast", new="q", rank=5, over="k j m q"),
    *_each("reductions", "x[m,k] z[n] s[r,q]", SHAPING, "f convert h", new="q", over="k q", rank=5),
    # Parts of a sum
    Alphabet("parts", "u[n+o] x[n] y[o]", f"{CAT} add", sums="n+o"),
    *_each("parts", "u[n+o] x[n] y[o]", CAT, UNARY, sums="n+o"),
    *_each("parts", "u[m,n+o] v[q,n+o] x[m,n] a[q,n] y[m,o] b[q,o] z[r]", CAT, BINARY, sums="n+o", wide=True),
    *_each("parts", "u[m,n+o] x[m,n] y[m,o]", CAT, SHAPING, sums="n+o", new="q"),
    Alphabet("parts free dot", "u[m+o,q,k] x[m,q,k] y[o,q,k] w[n,k]", f"{CAT} dot", sums="m+o", over="k m o m+o"),
    Alphabet(
        "parts contracted dot",
        "u[m,k+l,j] x[m,k,j] y[m,l,j] t[n,k+l,j] v[n,k,j] w[n,l,j]",
        f"{CAT} dot add",
        sums="k+l",
        over="k l k+l j",
    ),
    Alphabet(
        "dot over parts",
        "x[m,k,j] y[m,l,j] t[n,k+l,j]",
        "concat slice dot",
        sums="k+l",
        size=2,
        outer="add",
        most=5,
        over="k l k+l j",
        direct=True,
    ),
    # Blocks of a multiple
    *_each("blocks", "u[p*n] x[p,n]", BLOCKS, UNARY, multiples="p*n"),
    *_each("blocks", "u[m,p*n] v[q,p*n] x[m,p,n] y[q,p,n] z[r]", BLOCKS, BINARY, multiples="p*n", rank=4, wide=True),
    *_each("blocks", "u[m,p*n] x[m,p,n]", BLOCKS, SHAPING, multiples="p*n", new="q", rank=4),
    Alphabet("blocks free dot", "u[p*m,k] x[p,m,k] w[n,k]", f"{BLOCKS} dot", multiples="p*m", rank=4),
    Alphabet(
        "blocks contracted dot",
        "u[m,p*k,j] x[m,p,k,j] v[n,p*k,j] y[n,p,k,j]",
        f"{BLOCKS} dot",
        multiples="p*k",
        rank=5,
        over="p k p*k j",
    ),
    # Stacks
    *_each("stacks", "u[e,m] x[m] y[m]", STACK, UNARY, new="e"),
    *_each("stacks", "u[e,m] v[e,q] x[m] y[m] a[q] b[q]", STACK, BINARY, new="e", wide=True),
    *_each("stacks", "u[e,m,k] x[m,k] y[m,k]", STACK, "sum fold transpose", new="e"),
    Alphabet("stacks and sums", "u[e,m] x[m] y[m]", f"{STACK} sum add", new="e"),
    Alphabet(
        "stacks dot",
        "u[e,m,k] v[e,q,k] x[m,k] y[m,k] a[q,k] b[q,k]",
        f"{STACK} dot add",
        new="e",
        rank=4,
        over="e k",
    ),
    # Rows by number
    *_each("rows", "t[v,d] i[n]<v u[n,d]", ROWS, UNARY),
    *_each("rows", ROWS_OF_TWO, ROWS, "h add", wide=True, rank=7),
    Alphabet("rows mul", ROWS_OF_TWO, f"mul {ROWS}", wide=True, rank=7),  # few rows are multiplied rather than all
    Alphabet("scattered rows", "t[v,d] s[v,d] i[n]<v u[n,d] a[n,d]", f"{ROWS} scatter add"),
    Alphabet("subtracted rows", "t[v,d] i[n]<v u[n,d]", "put scatter neg sub"),
    *_each("rows", "t[v,d] i[n]<v u[n,d]", ROWS, SHAPING, new="q"),
    Alphabet(
        "rows dot",
        "s[v,o,m,k,g] t[v,b,m,k] i[n,l,g]<v u[n,l,g,a,m,k] w[n,c,m,k]",
        f"{ROWS} dot",
        over="n l v k",
        size=2,
        rank=8,
    ),
    Alphabet("rows of rows", "t[v,d] i[n]<v j[q]<n u[q,d]", f"{ROWS} add"),
    # Devices
    *_each("devices", "x[p*k] a[k]@p b[k]", DEVICES, UNARY, multiples="p*k", devices="p"),
    *_each(
        "devices",
        "x[m,p*k] y[q,p*k] a[m,k]@p b[q,k]@p c[r] d[s]",
        DEVICES,
        BINARY,
        multiples="p*k",
        devices="p",
        wide=True,
    ),
    *_each("devices", "x[m,p*k] a[m,k]@p", DEVICES, SHAPING, multiples="p*k", devices="p", new="q", outer=SPMD),
    Alphabet(
        "devices free dot",
        "x[p*m,q,k] a[m,q,k]@p w[n,k] b[n,k]@p",
        f"{DEVICES} dot",
        multiples="p*m",
        devices="p",
        outer=SPMD,
        over="k m p*m",
    ),
    Alphabet(
        "devices contracted dot",
        "x[m,p*k,j] a[m,k,j]@p w[n,p*k,j] b[n,k,j]@p",
        f"{DEVICES} dot",
        multiples="p*k",
        devices="p",
        outer=SPMD,
        over="k p*k j",
    ),
    Alphabet(
        "parallel free dot",
        "x[p*m,k] w[n,k]",
        "partition replicate dot",
        multiples="p*m",
        devices="p",
        outer="combine",
        over="k",
        direct=True,
    ),
    Alphabet(
        "parallel contracted dot",
        "x[m,p*k,j] w[n,p*k,j]",
        "partition replicate dot",
        multiples="p*k",
        devices="p",
        outer="reduce",
        over="k p*k j",
        direct=True,
    ),
    Alphabet(
        "parallel batch dot",
        "x[m,p*b,k] w[n,p*b,k]",
        "partition replicate dot",
        multiples="p*b",
        devices="p",
        outer="combine",
        over="k",
        direct=True,
    ),
    # Convolutions
    *_each(
        "convolutions",
        "x[b,i,h,c] y[a,i,h,c] w[r,c,n,j] v[r,c,o,j] z[q]",
        "conv",
        "add neg mul sum broadcast",
        rank=6,
        wide=True,
        new="s",
    ),
    Alphabet(
        "convolutions and dots",
        "x[b,h,i,c,g] v[i,d,c] w[r,d,n,g] t[r,c,n,g] u[n,o]",
        "conv dot",
        rank=5,
        over="i d c n",
    ),
    Alphabet(
        "convolutions of parts",
        "u[b+a,h,c] x[b,h,c] y[a,h,c] w[r,c,n] v[r,c,o] s[r,c,n+o]",
        f"{CAT} conv",
        sums="b+a n+o",
        rank=4,
    ),
    Alphabet(
        "convolutions over parts",
        "u[b,h,c+d] x[b,h,c] y[b,h,d] s[r,c+d,n] w[r,c,n] v[r,d,n]",
        f"{CAT} conv add",
        sums="c+d",
        rank=4,
    ),
    Alphabet(
        "convolutions of blocks",
        "u[p*b,h,c] x[p,b,h,c] w[r,c,q*n] v[r,c,q,n]",
        f"{BLOCKS} conv",
        multiples="p*b q*n",
        rank=5,
    ),
    Alphabet(
        "convolutions of stacks",
        "u[e,b,h,c] x[b,h,c] y[b,h,c] w[r,c,n] v[r,c,n] s[e,r,c,n]",
        f"{STACK} conv add",
        new="e",
        rank=4,
    ),
    Alphabet("convolutions of rows", "t[v,h,c] i[b]<v u[b,h,c] w[r,c,n]", f"{ROWS} conv", rank=4),
    Alphabet(
        "convolutions on devices",
        "x[p*b,h,c] a[b,h,c]@p w[r,c,p*n] v[r,c,n]@p",
        f"{DEVICES} conv",
        multiples="p*b p*n",
        devices="p",
        outer=SPMD,
        rank=4,
    ),
    Alphabet(
        "convolutions over devices",
        "x[b,h,p*c] a[b,h,c]@p w[r,p*c,n] v[r,c,n]@p",
        f"{DEVICES} conv",
        multiples="p*c",
        devices="p",
        outer=SPMD,
        rank=4,
    ),
    # Ways to cut and join among themselves
    Alphabet(
        "parts and blocks",
        "u[n+o,p*k] x[n,p*k] y[o,p*k] s[n+o,p,k] t[n,p,k] v[o,p,k]",
        f"{CAT} {BLOCKS}",
        sums="n+o",
        multiples="p*k",
    ),
    Alphabet(
        "parts and stacks", "u[e,n+o] v[e,n] s[n+o] t[n+o] x[n] y[o] a[n] b[o]", f"{CAT} {STACK}", sums="n+o", new="e"
    ),
    Alphabet("parts and rows", "t[v,n+o] i[m]<v u[m,n+o] x[v,n] y[v,o] z[m,n] w[m,o]", f"{CAT} {ROWS}", sums="n+o"),
    Alphabet(
        "parts of rows", "t[v,d] i[n]<v j[o]<v k[n+o]<v u[n,d] w[o,d] s[n+o,d]", f"concat slice {ROWS} add", sums="n+o"
    ),
    Alphabet("parts of tables", "t[n+o,d] i[m]<n s[n,d] j[m]<n+o u[m,d]", f"{CAT} {ROWS}", sums="n+o"),
    Alphabet(
        "parts and devices",
        "u[n+o,p*k] v[n,p*k] x[n,k]@p y[o,k]@p z[n] w[o] s[n+o,k]@p",
        f"{CAT} {DEVICES}",
        sums="n+o",
        multiples="p*k",
        devices="p",
    ),
    Alphabet(
        "blocks and stacks",
        "u[e,p*k] x[p*k] y[p*k] s[p,k] t[p,k] v[e,p,k]",
        f"{BLOCKS} {STACK}",
        multiples="p*k",
        new="e",
    ),
    Alphabet("blocks and rows", "t[v,p*k] i[m]<v u[m,p*k] s[v,p,k]", f"{BLOCKS} {ROWS}", multiples="p*k"),
    Alphabet("blocks of rows", "t[v,d] i[p*n]<v u[p*n,d] j[p,n]<v s[p,n,d]", f"{BLOCKS} {ROWS}", multiples="p*n"),
    Alphabet(
        "blocks and devices",
        "u[q*n,p*k] x[q,n,p*k] y[q*n,k]@p v[q,n,k]@p",
        f"{BLOCKS} {DEVICES}",
        multiples="q*n p*k",
        devices="p",
        rank=4,
    ),
    Alphabet(
        "blocks on devices", "u[p*k] x[p,k] y[k]@p", f"{BLOCKS} {DEVICES} sum", multiples="p*k", devices="p", rank=4
    ),
    Alphabet("stacks and rows", "t[v,d] s[v,d] i[n]<v j[n]<v u[n,d] w[n,d]", f"{STACK} {ROWS} add", new="e"),
    Alphabet(
        "stacks and devices",
        "u[e,p*k] x[p*k] y[p*k] a[k]@p b[k]@p s[e,k]@p",
        f"{STACK} {DEVICES}",
        multiples="p*k",
        new="e",
        devices="p",
    ),
    Alphabet(
        "rows and devices",
        "t[v,p*d] i[n]<v u[n,p*d] s[v,d]@p w[n,d]@p",
        f"{ROWS} {DEVICES}",
        multiples="p*d",
        devices="p",
    ),
    Alphabet(
        "rows of devices",
        "t[v,d] i[p*n]<v j[n]@p<v u[p*n,d]",
        f"{ROWS} {DEVICES}",
        multiples="p*n",
        devices="p",
        outer=SPMD,
    ),
    Alphabet(
        "devices and devices", "x[p*m,q*k] a[m,k]@p@q b[m,q*k]@p c[m]@p", DEVICES, multiples="p*m q*k", devices="p q"
    ),
)
