"""A program: one function traced for one signature, with everything known about its arguments and results."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from unity_jax import _compat, objects
from unity_jax.errors import UnsupportedError
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.residuals.change import positions
from unity_jax.residuals.offloaded import kept_here
from unity_jax.trace import build

if TYPE_CHECKING:
    from unity_jax.implement.record import Implementation
    from unity_jax.residuals.change import Change
    from unity_jax.residuals.ranges import Parts
    from unity_jax.residuals.record import Saving
    from unity_jax.rewrite.packing import Group, Packed
    from unity_jax.rewrite.record import Rewrite

KeyPath = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    **Fields:** `graph`; its inputs are `constants` (captured arrays) followed by the leaves of the arguments;
    `in_tree` of `(args, kwargs)` without static arguments; `out_tree`; `in_paths` and `out_paths`: readable names of
    the leaves; `in_suffixes`: the same below the argument (what functions that share a state have in common);
    `weak`: whether each result's type gives way to others (those that differ in this only are one program);
    `donated`: indices of donated graph inputs; `ties`: graph output index to the graph input that it replaces;
    `implementations`: what has another one than was traced; `rewrites`: what has been rewritten then; `savings`: how it
    was changed then to need less memory, `changes`: what each of these made of the graph before it, and `keeping`: this
    program before that; `hosted`: the inputs that are in the memory of the host from step to step, as are the results
    that replace them; `spilled`: the stacks that are there from the forward to the backward pass; `packed`: inputs that
    are held as one, each group after all other inputs, and its results after all other results (`rewrite.pack`);
    `unpacked`: this program before that; `offloads`: the stacks that the user would have on the host; `parts`: of one
    that is folded, how it has some layers apart from the others.
    """

    name: str
    graph: Graph
    constants: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    in_suffixes: tuple[str, ...]
    donated: tuple[int, ...]
    ties: dict[int, int]
    weak: tuple[bool, ...] = ()
    implementations: tuple[Implementation, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    traced: Program | None = None
    savings: tuple[Saving, ...] = ()
    changes: tuple[Change, ...] = ()
    keeping: Program | None = None
    hosted: frozenset[int] = frozenset()
    spilled: frozenset[Tensor] = frozenset()
    packed: tuple[Packed, ...] = ()
    unpacked: Program | None = None
    offloads: frozenset[Tensor] = frozenset()
    parts: Parts | None = None

    def implemented(self, graph: Graph, done: tuple[Implementation, ...]) -> Program:
        """The same function, some of it by other implementations."""
        every = (*self.implementations, *done)
        return dataclasses.replace(self, graph=graph, implementations=every, traced=self.traced or self)

    def rewritten(self, graph: Graph, rewrites: tuple[Rewrite, ...]) -> Program:
        """The same function, by another graph."""
        return dataclasses.replace(self, graph=graph, rewrites=rewrites, traced=self.traced or self, parts=None)

    def saving(self, made: Change, how: Saving) -> Program:
        """The same function, so changed that it needs less memory."""
        there = [t for op in made.graph.walk() for t in op.outputs] if self.spilled else []
        return dataclasses.replace(
            self,
            graph=made.graph,
            savings=(*self.savings, how),
            changes=(*self.changes, made),
            keeping=self.keeping or self,
            hosted=self.hosted | made.hosted,
            spilled=made.spilled.union(t for t in there if not self.spilled.isdisjoint((t, made.origin.get(t)))),
            traced=self.traced or self,
        )

    @functools.cached_property
    def hash(self) -> str:
        """Equal for programs that were traced equal, in any process: the key of saved plans."""
        if self.traced is not None:
            return self.traced.hash
        signed = functools.cache(lambda signature: f"{signature[:4]}")
        text = [str(self.graph), *(signed(op.signature) for op in self.graph.walk()), str(sorted(self.ties.items()))]
        text += [*self.in_paths, *self.out_paths, str(self.donated)]
        text += [str(positions(self.graph, self.offloads))] if self.offloads else []
        text = re.sub(r"0x[0-9a-f]+", "", "\n".join(text))  # parameters that are functions print their addresses
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def entering(self) -> list[Group]:
        """What is packed of the inputs of the unpacked program."""
        return [(p.packing, p.inputs) for p in self.packed]

    @property
    def leaving(self) -> list[Group]:
        """What is packed of the results of the unpacked program."""
        return [(p.packing, p.outputs) for p in self.packed if p.outputs]

    @property
    def on_host(self) -> dict[Tensor, list[int]]:
        """The inputs in the memory of the host, each with the results that replace it, by index."""
        return {self.graph.inputs[i]: [o for o, j in self.ties.items() if j == i] for i in sorted(self.hosted)}

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The graph inputs that are argument leaves."""
        return self.graph.inputs[len(self.constants) :]

    @property
    def input_names(self) -> tuple[str, ...]:
        """One per graph input."""
        return (*(f"const{i}" for i in range(len(self.constants))), *self.in_paths)


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    ties: Mapping[str, str] | None = None,
) -> Program:
    """Trace `fun` as `jax.jit` would. Array arguments may be `jax.ShapeDtypeStruct`s.

    **Arguments:** `ties`: output path to the path of the input that it replaces, where donation and equal paths do
    not say so.
    **Raises:** `UnsupportedError` for `jax.Ref` state.
    """
    __tracebackhide__ = True

    # Tracing caches on the function object: a fresh one keeps plans of one function under several meshes apart.
    @functools.wraps(fun)
    def fresh(*a: Any, **k: Any) -> Any:
        __tracebackhide__ = True
        before = dict(jax.tree_util.tree_leaves_with_path((a, k)))
        result = fun(*a, **k)
        _warn_of_lost_updates(_name(fun), before, dict(jax.tree_util.tree_leaves_with_path((a, k))), result)
        return result

    jitted = jax.jit(
        fresh,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    traced = jitted.trace(*args, **kwargs)
    in_leaves, in_tree = jax.tree_util.tree_flatten_with_path(traced.args_info)
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    in_keys = [path for path, _ in in_leaves]
    opened, _ = _compat.open_jaxpr(traced.jaxpr)
    if len(opened.invars) != len(in_keys):
        raise UnsupportedError(
            f"{_name(fun)} captures a value that an outer transformation is tracing, or a jax.Ref: pass it as an "
            f"argument"
        )
    constants: list[Any] = []
    graph = build(traced.jaxpr, [jax.tree_util.keystr(_without_kind(p)) for p in in_keys], constants)
    graph, _, _, offloads = kept_here(graph)
    n = len(constants)
    donated = tuple(n + i for i, (_, info) in enumerate(in_leaves) if info.donated)
    found = _tie(graph, in_keys, [p for p, _ in out_leaves], n, set(donated), ties or {})
    return Program(
        _name(fun),
        graph,
        tuple(constants),
        in_tree,
        out_tree,
        tuple(jax.tree_util.keystr(_without_kind(p)) for p in in_keys),
        tuple(jax.tree_util.keystr(p) for p, _ in out_leaves),
        tuple(jax.tree_util.keystr(p[2:]) for p in in_keys),
        donated,
        found,
        tuple(_compat.is_weak(v.aval) for v in opened.outvars),
        offloads=offloads,
    )


def _warn_of_lost_updates(name: str, before: Mapping[KeyPath, Any], after: Mapping[KeyPath, Any], result: Any) -> None:
    """Objects that a function changes in place are copies while it is traced, as under `jax.jit`: what it does not
    return is lost. Dictionaries and lists may be scratch space, and are left out."""
    returned = {id(x) for x in jax.tree.leaves(result)}
    plain = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
    lost = [
        path
        for path, leaf in after.items()
        if leaf is not before.get(path) and id(leaf) not in returned and not all(isinstance(k, plain) for k in path)
    ]
    if lost:
        warnings.warn(
            f"{name} changes its argument {jax.tree_util.keystr(_without_kind(lost[0]))} in place"
            f"{f', and {len(lost) - 1} more' if lost[1:] else ''}; as under jax.jit, such changes are lost unless they "
            "are returned. Of flax.nnx, pass the objects themselves, or return their nnx.state",
            stacklevel=2,
        )


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


def _without_kind(path: KeyPath) -> KeyPath:
    """Argument paths start with 0 for positional or 1 for keyword arguments; names need only the rest."""
    return path[1:]


def _tie(
    graph: Graph,
    in_keys: Sequence[KeyPath],
    out_keys: Sequence[KeyPath],
    constants: int,
    donated: set[int],
    named: Mapping[str, str],
) -> dict[int, int]:
    """Which output replaces which input.

    The arrays of objects replace those of before. Another output replaces the input whose path, below its argument,
    equals its own path or its path below its first key, if shape and dtype agree; a donated input that is still free
    then takes the first equal output, as donation would.
    """
    names = {jax.tree_util.keystr(_without_kind(p)): constants + i for i, p in enumerate(in_keys)}
    found: dict[int, int] = {}
    for out, source in named.items():
        outs = [i for i, p in enumerate(out_keys) if jax.tree_util.keystr(p) == out]
        if not outs or source not in names:
            raise ValueError(
                f"options.ties: {out!r} -> {source!r} names no output or no input (inputs: "
                f"{', '.join(list(names)[:5])}, ...)"
            )
        found[outs[0]] = names[source]
    for i, path in enumerate(out_keys):
        j = names.get(jax.tree_util.keystr(path)) if path[:1] in ((objects.ARGS,), (objects.KWARGS,)) else None
        if i not in found and j is not None and _same(graph.outputs[i], graph.inputs[j]):
            found[i] = j
    out_keys = [path[1:] if path[:1] == (objects.RESULT,) else path for path in out_keys]
    below: dict[KeyPath, list[int]] = {}
    for i, path in enumerate(in_keys):
        below.setdefault(path[2:], []).append(constants + i)
    for i, path in enumerate(out_keys):
        for key in (path, path[1:]):
            free = [
                j for j in below.get(key, ()) if j not in found.values() and _same(graph.outputs[i], graph.inputs[j])
            ]
            free = [j for j in free if j in donated or key]
            if i not in found and free:
                found[i] = min(free, key=lambda j: (j not in donated, j))  # donated inputs are state by the user's word
    for j in sorted(donated - set(found.values())):
        i = next((i for i, t in enumerate(graph.outputs) if i not in found and _same(t, graph.inputs[j])), None)
        if i is not None:
            found[i] = j
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
