"""Rules that are right and rules that are wrong, as text: `given: results => results`, results between `|`."""

from unity_jax.rewrite.rule import Rule, make_rule


def parsed(name: str, text: str) -> Rule:
    """A rule from one line, with conditions after `when`."""
    given, body = text.split(": ", 1)
    body, _, when = body.partition(" when ")
    source, target = ([t.strip() for t in side.split("|")] for side in body.split("=>"))
    return make_rule(name, given.split(), source, target, [w.strip() for w in when.split(",")] if when else [])


CLASSICS = {
    # parallel matmuls
    "data parallel": "x[p*m,k] w[k,n]: dot(x, w; k) => combine(dot(partition(x; p*m), replicate(w; p); k); p*m)",
    "column parallel": "x[m,k] w[k,p*n]: dot(x, w; k) => combine(dot(replicate(x; p), partition(w; p*n); k); p*n)",
    "row parallel": "x[m,p*k] w[p*k,n]: dot(x, w; p*k) => reduce(dot(partition(x; p*k), partition(w; p*k); k); p)",
    "on a grid of devices": "x[p*m,q*k] w[q*k,n]: dot(x, w; q*k) =>"
    " combine(reduce(dot(partition(partition(x; p*m); q*k), replicate(partition(w; q*k); p); k); q); p*m)",
    "column, then row": "x[m,k] v[k,p*h] w[p*h,n]: dot(f(dot(x, v; k)), w; p*h) =>"
    " reduce(dot(f(dot(replicate(x; p), partition(v; p*h); k)), partition(w; p*h); h); p)",
    "data parallel conv": "x[p*b,h,c] w[c,r,o]: conv(x, w; c, h, r) =>"
    " combine(conv(partition(x; p*b), replicate(w; p); c, h, r); p*b)",
    "channel parallel conv": "x[b,h,p*c] w[p*c,r,o]: conv(x, w; p*c, h, r) =>"
    " reduce(conv(partition(x; p*c), partition(w; p*c); c, h, r); p)",
    "partial sums below a conv": "x[b,h,c]@p w[c,r,o]: conv(reduce(x; p), w; c, h, r) =>"
    " reduce(conv(x, replicate(w; p); c, h, r); p)",
    "table by columns": "t[v,p*d] i[n]<v: take(t, i) => combine(take(partition(t; p*d), replicate(i; p)); p*d)",
    "table by rows of numbers": "t[v,d] i[p*n]<v: take(t, i) => combine(take(replicate(t; p), partition(i; p*n)); p*n)",
    # reductions through linear ops, and among themselves
    "reduce below matmul": "x[m,k]@p w[k,n]: dot(reduce(x; p), w; k) => reduce(dot(x, replicate(w; p); k); p)",
    "two reductions": "x[m]@p y[m]@p: add(reduce(x; p), reduce(y; p)) => reduce(add(x, y); p)",
    "two reductions of parts": "x[n]@p y[o]@p: reduce(x; p) | reduce(y; p) =>"
    " slice(reduce(concat(x, y; n+o); p); n+o, 0) | slice(reduce(concat(x, y; n+o); p); n+o, 1)",
    "reductions over two axes": "x[m]@p@q: reduce(reduce(x; p); q) => reduce(reduce(x; q); p)",
    "reduce below negation": "x[m]@p: neg(reduce(x; p)) => reduce(neg(x); p)",
    "reduce below a sum": "x[m,k]@p: sum(reduce(x; p); k) => reduce(sum(x; k); p)",
    "reduce below a slice": "x[n+o]@p: slice(reduce(x; p); n+o, 1) => reduce(slice(x; n+o, 1); p)",
    "reduce of scattered": "t[v,d] u[n,d]@p i[n]<v: scatter(t, reduce(u; p), i; n) =>"
    " add(t, reduce(put(u, replicate(i; p); n); p))",
    "copies counted": "x[p*m]: reduce(replicate(reduce(partition(x; p*m); p); p); p) =>"
    " reduce(partition(reduce(replicate(x; p); p); p*m); p)",
    "counts": "x[] y[k]: sum(mul(y, sum(broadcast(x; k); k)); k) => mul(sum(y; k), sum(broadcast(x; k); k))",
    "add as reduction": "x[m] y[m]: add(x, y) => reduce(partition(stack(x, y; p); p); p)",
    "gathered twice": "x[p*m]: combine(partition(x; p*m); p*m) => x",
    "sharded functions": "x[p*m]: f(x) => combine(f(partition(x; p*m)); p*m)",
    # siblings
    "sibling merge": "x[m,k] v[k,n] w[k,o]: dot(x, v; k) | dot(x, w; k) =>"
    " slice(dot(x, concat(v, w; n+o); k); n+o, 0) | slice(dot(x, concat(v, w; n+o); k); n+o, 1)",
    "sibling split": "x[m,k] v[k,n] w[k,o]: dot(x, concat(v, w; n+o); k) => concat(dot(x, v; k), dot(x, w; k); n+o)",
    "three siblings": "x[m,k] u[k,n] v[k,o] w[k,q]: dot(x, u; k) | dot(x, v; k) | dot(x, w; k) =>"
    " slice(dot(x, concat(u, v, w; n+o+q); k); n+o+q, 0) | slice(dot(x, concat(u, v, w; n+o+q); k); n+o+q, 1)"
    " | slice(dot(x, concat(u, v, w; n+o+q); k); n+o+q, 2)",
    "siblings of one weight": "x[m,k] y[l,k] w[k,n]: dot(x, w; k) | dot(y, w; k) =>"
    " slice(dot(concat(x, y; m+l), w; k); m+l, 0) | slice(dot(concat(x, y; m+l), w; k); m+l, 1)",
    "siblings under a function": "x[m,k] v[k,n] w[k,o]: f(dot(x, v; k)) | f(dot(x, w; k)) =>"
    " slice(f(dot(x, concat(v, w; n+o); k)); n+o, 0) | slice(f(dot(x, concat(v, w; n+o); k)); n+o, 1)",
    "sibling convs": "x[b,h,c] v[c,r,n] w[c,r,o]: conv(x, v; c, h, r) | conv(x, w; c, h, r) =>"
    " slice(conv(x, concat(v, w; n+o); c, h, r); n+o, 0) | slice(conv(x, concat(v, w; n+o); c, h, r); n+o, 1)",
    "stacked branches": "x[m,k] y[m,k] v[k,n] w[k,n]: dot(x, v; k) | dot(y, w; k) =>"
    " unstack(dot(stack(x, y; d), stack(v, w; d); k); d, 0) | unstack(dot(stack(x, y; d), stack(v, w; d); k); d, 1)",
    "stacks of parts": "x[n] y[o] z[n]: stack(x, z; d) | stack(y, y; d) =>"
    " slice(stack(concat(x, y; n+o), concat(z, y; n+o); d); n+o, 0)"
    " | slice(stack(concat(x, y; n+o), concat(z, y; n+o); d); n+o, 1)",
    "stacked tables": "t[v,d] u[v,d] i[n]<v j[n]<v: take(t, i) | take(u, j) =>"
    " unstack(take(stack(t, u; s), stack(i, j; s)); s, 0) | unstack(take(stack(t, u; s), stack(i, j; s)); s, 1)",
    # concatenations
    "matmul over a concat": "x[m,k] y[m,l] v[k,n] w[l,n]: dot(concat(x, y; k+l), concat(v, w; k+l); k+l) =>"
    " add(dot(x, v; k), dot(y, w; l))",
    "weight cut by a concat": "x[m,k] y[m,l] w[k+l,n]: dot(concat(x, y; k+l), w; k+l) =>"
    " add(dot(x, slice(w; k+l, 0); k), dot(y, slice(w; k+l, 1); l))",
    "weight cut in three": "x[m,k] y[m,l] z[m,j] w[k+l+j,n]: dot(concat(x, y, z; k+l+j), w; k+l+j) =>"
    " add(add(dot(x, slice(w; k+l+j, 0); k), dot(y, slice(w; k+l+j, 1); l)), dot(z, slice(w; k+l+j, 2); j))",
    "concat of slices": "x[n+o]: concat(slice(x; n+o, 0), slice(x; n+o, 1); n+o) => x",
    "halves of a concat": "x[n,m] y[n,m]: slice(concat(x, y; n+n); n+n, 0) | slice(concat(x, y; n+n); n+n, 1) => x | y",
    "siblings of one width": "x[m,k] v[k,n] w[k,n]: dot(x, v; k) | dot(x, w; k) =>"
    " slice(dot(x, concat(v, w; n+n); k); n+n, 0) | slice(dot(x, concat(v, w; n+n); k); n+n, 1)",
    "three of one width": "x[m,k] u[k,n] v[k,n] w[k,n]: dot(x, u; k) | dot(x, v; k) | dot(x, w; k) =>"
    " slice(dot(x, concat(u, v, w; n+n+n); k); n+n+n, 0) | slice(dot(x, concat(u, v, w; n+n+n); k); n+n+n, 1)"
    " | slice(dot(x, concat(u, v, w; n+n+n); k); n+n+n, 2)",
    "sum of a concat": "x[m,n] y[m,o]: sum(concat(x, y; n+o); n+o) => add(sum(x; n), sum(y; o))",
    "pads add up": "x[n] y[o]: add(pad(x; n+o, 0), pad(y; n+o, 1)) => concat(x, y; n+o)",
    "gradient of a slice": "x[k,n+o] u[m,n]: dot(x, pad(u; n+o, 0); n+o) => dot(slice(x; n+o, 0), u; n)",
    "function of a concat": "x[n] y[o]: f(concat(x, y; n+o)) => concat(f(x), f(y); n+o)",
    # linear algebra
    "linear in the input": "x[m,k] y[m,k] w[k,n]: add(dot(x, w; k), dot(y, w; k)) => dot(add(x, y), w; k)",
    "linear in the weight": "x[m,k] v[k,n] w[k,n]: add(dot(x, v; k), dot(x, w; k)) => dot(x, add(v, w); k)",
    "linear differences": "x[m,k] v[k,n] w[k,n]: sub(dot(x, v; k), dot(x, w; k)) => dot(x, sub(v, w); k)",
    "associativity": "x[m,k] y[k,l] z[l,n]: dot(dot(x, y; k), z; l) => dot(x, dot(y, z; l); k)",
    "associativity in a batch": "x[b,m,k] y[b,k,l] z[b,l,n]: dot(dot(x, y; k), z; l) => dot(x, dot(y, z; l); k)",
    "four factors": "x[m,k] y[k,l] z[l,n] w[n,o]: dot(dot(dot(x, y; k), z; l), w; n) =>"
    " dot(x, dot(y, dot(z, w; n); l); k)",
    "two sums over one name": "a[k,q] b[k,q] u[k,m] x[k,m]: dot(a, dot(b, dot(u, x; k)); k) =>"
    " dot(u, dot(x, dot(b, a; k)); k)",
    "transposition": "x[m,k] y[k,n]: transpose(dot(x, y; k); n, m) => dot(transpose(y; n, k), transpose(x; k, m); k)",
    "scales pass matmuls": "x[m,k] w[k,n] s[]: mul(dot(x, w; k), s) => dot(mul(x, s), w; k)",
    "row scales pass matmuls": "x[m,k] w[k,n] s[m]: mul(dot(x, w; k), s) => dot(mul(x, s), w; k)",
    "column scales": "x[m,k] w[k,n] s[n]: mul(dot(x, w; k), s) => dot(x, mul(w, s); k)",
    "inner scales": "x[m,k] w[k,n] s[k]: dot(mul(x, s), w; k) => dot(x, mul(w, s); k)",
    "distribution": "x[m] y[m] z[m] w[m]: mul(add(x, y), add(z, w)) =>"
    " add(add(mul(x, z), mul(y, w)), add(mul(x, w), mul(y, z)))",
    "conv, then matmul": "x[b,h,c] w[c,r,n] v[n,o]: dot(conv(x, w; c, h, r), v; n) => conv(x, dot(w, v; n); c, h, r)",
    "matmul, then conv": "x[b,h,c] v[c,d] w[d,r,o]: conv(dot(x, v; c), w; d, h, r) => conv(x, dot(v, w; d); c, h, r)",
    "a conv of one place": "x[b,h,c] w[c,r,o]: conv(x, w; c, h, r) => sum(dot(x, w; c); r) when r == 1",
    # selections and poolings below matmuls
    "slice below matmul": "x[m+l,k] w[k,n]: slice(dot(x, w; k); m+l, 0) => dot(slice(x; m+l, 0), w; k)",
    "rows below matmul": "x[v,k] w[k,n] i[b]<v: take(dot(x, w; k), i) => dot(take(x, i), w; k)",
    "rows of a function": "x[v] i[b]<v: take(f(x), i) => f(take(x, i))",
    "one of a stack": "x[d,m,k] w[k,n]: unstack(dot(x, w; k); d, 0) => dot(unstack(x; d, 0), w; k)",
    "pooling as contraction": "x[b,h,c] q[h,o] w[c,n]: dot(dot(x, w; c), q; h) => dot(dot(x, q; h), w; c)",
    "pooling of blocks": "x[p*m,k] w[k,n]: sum(split(dot(x, w; k); p*m); m) => dot(sum(split(x; p*m); m), w; k)",
    "sum below matmul": "x[b,s,k] w[k,n]: sum(dot(x, w; k); s) => dot(sum(x; s), w; k)",
    "a bag of rows": "t[v,k] w[k,n] i[b,s]<v: dot(sum(take(t, i); s), w; k) => sum(take(dot(t, w; k), i); s)",
    # rows and their gradients
    "SGD scatters": "t[v,d] u[n,d] i[n]<v s[]: sub(t, mul(put(u, i; n), s)) => scatter(t, neg(mul(u, s)), i; n)",
    "two scatters": "t[v,d] u[n,d] w[o,d] i[n]<v j[o]<v: scatter(scatter(t, u, i; n), w, j; o) =>"
    " scatter(t, concat(u, w; n+o), concat(i, j; n+o); n+o)",
    "rows and their adjoint": "x[v,k] u[n,k] i[n]<v: dot(take(x, i), u; n, k) => dot(x, put(u, i; n); v, k)",
    "sum of put rows": "u[n,d] i[n]<v: sum(put(u, i; n); v) => sum(u; n)",
    "product with put rows": "t[v,d] u[n,d] i[n]<v: mul(t, put(u, i; n)) => put(mul(take(t, i), u), i; n)",
    "one-hot squared": "x[v] i[n]<v: dot(mul(onehot(i), onehot(i)), x; v) => take(x, i)",
    "decay of rows": "t[v,d] u[n,d] i[n]<v s[]: sub(t, mul(add(put(u, i; n), mul(t, put(u, i; n))), s)) =>"
    " scatter(t, neg(mul(add(u, mul(take(t, i), u)), s)), i; n)",
    "rows of rows": "t[v,d] i[n]<v j[b]<n: take(take(t, i), j) => take(t, take(i, j))",
    "rows of rows that share": "t[v,n,d] i[n]<v j[b]<n: take(take(t, i), j) => take(take(t, j), take(i, j))",
    "rows of two dimensions": "t[v,w] i[n]<v j[b]<w: take(take(t, i), j) => take(take(t, j), i)",
    "rows as a contraction": "t[v,d] i[n]<v: take(t, i) => dot(t, onehot(i); v)",
    # folds, functions, precision
    "fold by blocks": "x[m,p*n]: fold(x; p*n) => fold(split(x; p*n); p, n)",
    "fold of a slice": "x[m+l,n]: slice(fold(x; n); m+l, 0) => fold(slice(x; m+l, 0); n)",
    "sharded fold": "x[p*m,n]: fold(x; n) => combine(fold(partition(x; p*m); n); p*m)",
    "precision of a slice": "x[n+o]: convert(slice(x; n+o, 0)) => slice(convert(x); n+o, 0)",
    "precision before gathering": "x[m]@p: convert(combine(x; p*m)) => combine(convert(x); p*m)",
    "functions of two": "x[p*m] y[p*m]: h(x, y) => combine(h(partition(x; p*m), partition(y; p*m)); p*m)",
    "one element of one": "x[m]: reduce(replicate(x; p); p) => x when p == 1",
}

WRONG = {
    "signs": {
        "sub for add": "x[m] y[m]: add(x, y) => sub(x, y)",
        "sub turned round": "x[m] y[m]: sub(x, y) => sub(y, x)",
        "negation lost": "x[m,k] w[k,n]: neg(dot(x, w; k)) => dot(x, w; k)",
        "two negations": "x[m,k] w[k,n]: dot(neg(x), neg(w); k) => neg(dot(x, w; k))",
        "update up the hill": "t[v,d] u[n,d] i[n]<v: sub(t, put(u, i; n)) => scatter(t, u, i; n)",
        "linear differences": "x[m,k] v[k,n] w[k,n]: sub(dot(x, v; k), dot(x, w; k)) => dot(x, add(v, w); k)",
        "difference of differences": "x[m] y[m] z[m]: sub(sub(x, y), z) => sub(x, sub(y, z))",
        "function of a negation": "x[m]: f(neg(x)) => neg(f(x))",
        "cut with a sign": "x[m,k] y[m,l] w[k+l,n]: dot(concat(x, y; k+l), w; k+l) =>"
        " sub(dot(x, slice(w; k+l, 0); k), dot(y, slice(w; k+l, 1); l))",
    },
    "axes and parts": {
        "the other half": "x[n+n]: slice(x; n+n, 0) => slice(x; n+n, 1)",
        "halves swapped": "x[n] y[n]: concat(x, y; n+n) => concat(y, x; n+n)",
        "siblings swapped": "x[m,k] v[k,n] w[k,n]: dot(x, v; k) | dot(x, w; k) =>"
        " slice(dot(x, concat(v, w; n+n); k); n+n, 1) | slice(dot(x, concat(v, w; n+n); k); n+n, 0)",
        "stack swapped": "x[m] y[m]: stack(x, y; d) => stack(y, x; d)",
        "another element": "x[d,m]: unstack(x; d, 0) => unstack(x; d, 1)",
        "weights crossed": "x[m,k] y[m,k] v[k,n] w[k,n]: add(dot(x, v; k), dot(y, w; k)) =>"
        " add(dot(x, w; k), dot(y, v; k))",
        "cut crossed": "x[m,k] y[m,k] w[k+k,n]: dot(concat(x, y; k+k), w; k+k) =>"
        " add(dot(x, slice(w; k+k, 1); k), dot(y, slice(w; k+k, 0); k))",
        "pad at the other end": "x[n]: pad(x; n+n, 0) => pad(x; n+n, 1)",
        "reduced by the other axis": "x[m]@p@q y[m]@p@q: mul(reduce(reduce(x; p); q), reduce(reduce(y; p); q)) =>"
        " reduce(mul(reduce(x; q), reduce(y; q)); p)",
        "batch lost": "x[b,m] y[b,n]: dot(x, y; b) => dot(sum(x; b), sum(y; b))",
        "rows of other numbers": "t[v,d] i[n]<v j[n]<v: take(t, i) | take(t, j) => take(t, j) | take(t, i)",
        "scale of the wrong side": "x[m,k] w[k,n] s[k]: dot(mul(x, s), w; k) => mul(dot(x, w; k), sum(s; k))",
        "arguments turned": "x[m] y[m]: h(x, y) => h(y, x)",
        "filter of a neighbour": "x[b,h,c] v[c,r,o] w[c,r,o]: conv(x, v; c, h, r) | conv(x, w; c, h, r) =>"
        " conv(x, w; c, h, r) | conv(x, v; c, h, r)",
    },
    "algebra": {
        "product for a sum": "x[m,k] v[k,n] w[k,n]: mul(dot(x, v; k), dot(x, w; k)) => dot(x, mul(v, w); k)",
        "sum of products": "x[m,k] y[m,k]: sum(mul(x, y); k) => mul(sum(x; k), sum(y; k))",
        "cross terms lost": "x[m] y[m] z[m] w[m]: mul(add(x, y), add(z, w)) => add(mul(x, z), mul(y, w))",
        "function of a sum": "x[m] y[m]: f(add(x, y)) => add(f(x), f(y))",
        "function of a product": "x[m] y[m]: f(mul(x, y)) => mul(f(x), f(y))",
        "function of a matmul": "x[m,k] w[k,n]: f(dot(x, w; k)) => dot(f(x), w; k)",
        "functions in turn": "x[m]: f(g(x)) => g(f(x))",
        "precision of a sum": "x[m] y[m]: convert(add(x, y)) => add(convert(x), convert(y))",
        "precision of a matmul": "x[m,k] w[k,n]: convert(dot(x, w; k)) => dot(convert(x), convert(w); k)",
        "fold of folds": "x[n,o]: fold(fold(x; n); o) => fold(x; n, o)",
        "fold of a sum": "x[m,k] y[m,k]: fold(add(x, y); k) => add(fold(x; k), fold(y; k))",
        "function of a fold": "x[m,k]: f(fold(x; k)) => fold(f(x); k)",
        "function of a pad": "x[n]: f(pad(x; n+o, 0)) => pad(f(x); n+o, 0)",
        "function of put rows": "u[n,d] i[n]<v: f(put(u, i; n)) => put(f(u), i; n)",
        "put rows are not taken back": "u[n,d] i[n]<v: take(put(u, i; n), i) => u when v == 2",
        "product of put rows": "u[n,d] w[n,d] i[n]<v: mul(put(u, i; n), put(w, i; n)) => put(mul(u, w), i; n)",
        "pads are lost": "x[n] y[o]: concat(x, y; n+o) => pad(x; n+o, 0)",
        "captured by a sum": "x[k] y[k]: mul(sum(x; k), y) => mul(x, sum(y; k))",
        "counted once": "x[m]: add(x, x) => x",
        "squares": "x[m]: mul(x, x) => x",
        "the sum added twice": "x[m,k] y[m,k] w[k,n]: dot(add(x, y), w; k) => add(dot(add(x, y), w; k), dot(y, w; k))",
        "bias counted by all": "x[m,k]@p b[m]: add(sum(reduce(x; p); k), b) =>"
        " reduce(add(sum(x; k), replicate(b; p)); p)",
    },
    "sizes": {
        "a window of one": "x[b,h,c] w[c,r,o]: conv(x, w; c, h, r) => sum(dot(x, w; c); r)",
        "sums of copies": "x[m]: sum(broadcast(x; k); k) => x",
        "counts of two sizes": "x[]: sum(broadcast(x; m); m) => sum(broadcast(x; n); n)",
        "a stack of two": "x[d,m]: add(unstack(x; d, 0), unstack(x; d, 1)) => sum(x; d)",
        "one row": "x[v,d] i[n]<v: take(x, i) => broadcast(sum(x; v); n)",
        "condition on another size": "x[b,h,c] w[c,r,o]: conv(x, w; c, h, r) => sum(dot(x, w; c); r) when c == 1",
        "the first of one": "x[d,m]: unstack(x; d, 0) => sum(x; d)",
        "fold of squares": "x[m,k]: fold(x; k) => fold(mul(x, x); k) when k == 2",
    },
    "one shard": {
        "sum of copies": "x[m]: reduce(replicate(x; p); p) => x",
        "function before the sum": "x[m]@p: f(reduce(x; p)) => reduce(f(x); p)",
        "product of sums": "x[m]@p y[m]@p: mul(reduce(x; p), reduce(y; p)) => reduce(mul(x, y); p)",
        "row parallel, gathered by function": "x[m,p*k] w[p*k,n]: f(dot(x, w; p*k)) =>"
        " reduce(f(dot(partition(x; p*k), partition(w; p*k); k)); p)",
        "fold per shard": "x[m,p*k]: fold(x; p*k) => reduce(fold(partition(x; p*k); k); p)",
        "sum per shard": "x[p*m]: replicate(sum(x; p*m); p) => sum(partition(x; p*m); m)",
        "rows per shard": "t[v,d]@p i[n]<v: take(reduce(t; p), i) => reduce(mul(take(t, replicate(i; p)),"
        " take(t, replicate(i; p))); p)",
        "conv of both": "x[b,h,c]@p w[c,r,o]@p: conv(reduce(x; p), reduce(w; p); c, h, r) =>"
        " reduce(conv(x, w; c, h, r); p)",
        "the same on each device": "x[m]@p: x => replicate(reduce(x; p); p)",
        "precision before the sum": "x[m]@p: convert(reduce(x; p)) => reduce(convert(x); p)",
    },
    "unbound": {
        "a new summand": "x[m] y[m]: x => sub(add(x, y), y)",
        "a new factor": "x[m,k] w[k,n] v[k,n]: dot(x, w; k) => dot(x, v; k)",
        "a new table": "i[n]<v j[n]<v t[v,d]: take(t, i) => take(t, j)",
        "a new weight beside": "x[m,k] v[k,n] w[k,o]: dot(x, v; k) => slice(dot(x, concat(v, w; n+o); k); n+o, 0)",
    },
    "no types": {
        "another axis": "x[m,k] y[m,k]: sum(x; k) => sum(x; m)",
        "a value of one device": "x[m]@p: reduce(x; p) => x",
        "a shard for the whole": "x[p*m]: partition(x; p*m) => x",
        "blocks in another order": "x[p,n]: merge(x; p*n) => merge(x; n*p)",
        "parts in another order": "x[n] y[o]: concat(x, y; n+o) => concat(y, x; o+n)",
        "operands on other devices": "x[m,k]@p w[k,n]: reduce(dot(x, w; k); p) => dot(reduce(x; p), w; k)",
        "fewer results": "x[m] y[m]: x | y => x",
        "a contracted size": "x[m,k] w[l,n]: dot(x, w; k) => dot(x, w; k)",
        "concat per shard": "x[m]@p y[l]@p: concat(combine(x; p*m), combine(y; p*l); p*m+p*l) =>"
        " combine(concat(x, y; m+l); p*(m+l))",
    },
}
"""By what is wrong with them; all distinct."""
