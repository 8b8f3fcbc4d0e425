"""Plans as text, compared as text."""

import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import unity_jax as unity
from unity_jax import _compat
from unity_jax.network.collectives import Collective
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Leaf, Plan, Predicted
from unity_jax.plan.record import Record
from unity_jax.plan.table import compare
from unity_jax.rewrite.record import Rewrite
from unity_jax.search.searched import Searched
from unity_jax.text import WIDTH, seconds, short_source, size

MESH = MeshAxes(("data", "model"), (2, 4))
MERGED = Rewrite("siblings-dot-concat-1", "nets/encoder.py:9", 2, 1e-4, "by axioms", ())
LINE = "/home/me/project/nets/encoder.py:12:8 (Encoder.__call__)"


def leaf(path, shape, *dims, dtype="float32"):
    layout = Layout(tuple(tuple(d.split("+")) if d else () for d in dims) if dims else ((),) * len(shape))
    nbytes = 4
    for n in layout.local_shape(shape, MESH):
        nbytes *= n
    return Leaf(path, shape, dtype, layout, nbytes)


def layers(tree, *, bias="model"):
    """Three equal layers of two matrices and a bias."""
    for i in range(3):
        yield leaf(f"{tree}['layers'][{i}]['up']['bias']", (512,), bias)
        yield leaf(f"{tree}['layers'][{i}]['up']['kernel']", (128, 512), "", "model")
        yield leaf(f"{tree}['layers'][{i}]['down']['kernel']", (512, 128), "model", "")


def plan_of(inputs, collectives=(), **changes):
    """A plan with these leaves, made by hand so that no change of the planner changes the text."""
    fields = {
        "mesh": _compat.abstract_mesh(MESH.names, MESH.sizes),
        "machine": "h100:8",
        "memory_limit": 2.0**30,
        "predicted": Predicted(3e-3, 2e-3, 1e-3, 2**29, 1.5e9, tuple(collectives), 2.5e-3),
        "inputs": tuple(inputs),
        "outputs": (),
        "largest": (("activations f32[512,512]", 2**28),),
        "label": "search",
        "replicated": (),
        "program_hash": "",
        "function": "train_step",
        "record": Record(True, (), (), ()),
    }
    return Plan(**fields | changes)


STATE = [
    leaf("[0].step", (), dtype="int32"),
    leaf("[0].params['embed']['embedding']", (1000, 128), "", "data+model"),
    leaf("[0].params['norm']['bias']", (128,)),
    leaf("[0].params['norm']['scale']", (128,)),
    *layers("[0].params"),
    leaf("[0].opt_state[0].mu['norm']['bias']", (128,)),
    *layers("[0].opt_state[0].mu", bias=""),
    leaf("[0].opt_state[0].nu['norm']['bias']", (128,)),
    *layers("[0].opt_state[0].nu", bias=""),
    leaf("[0].opt_state[1]['layers'][0]['up']['bias']", (7,)),
    leaf("[1]['tokens']", (32, 64), "data", "", dtype="int32"),
]


def same(text, expected):
    assert textwrap.indent(text, " " * 8).rstrip() == expected.strip("\n").rstrip()


SORT = "sort f32[1000] at step.py:9:4 (loss): its rule keeps every dimension whole"


def test_layouts_and_collectives():
    collectives = [
        Collective("all_reduce", ("model",), 2**20, 6, 1, 1e-4, LINE),
        Collective("all_reduce", ("model",), 2**10, 2, 1, 1e-5, LINE),
        Collective("all_gather", ("data",), 2**19, 2, 24, 1e-6, "step.py:7:1 (loss)"),
        Collective("reduce_scatter", ("data", "model"), 2**19, 1, 1, 3e-5, "output"),
    ]
    same(
        str(plan_of(STATE, collectives, replicated=(SORT,))),
        """
        Plan of train_step for h100:8: mesh (data=2, model=4), found by search
          step         3 ms = 2 ms compute + 1 ms exposed communication
          lower bound  2.5 ms: as written, no plan for this mesh and machine is more than 20.00% faster
          work         1.5e+09 flops per device
          peak memory  512 MiB of 1 GiB per device

        Layouts
         argument                             leaves   type and layout              per device
         ─────────────────────────────────────────────────────────────────────────────────────
         [0]                                      34                                 1.201 MiB
           .step                                   1   i32[]                               4 B
           .params                                12                                   449 KiB
             ['embed']['embedding']                1   f32[1000,128@(data,model)]     62.5 KiB
             ['norm']['{bias,scale}']              2   f32[128]                          1 KiB
             ['layers'][0..2]                      9                                 385.5 KiB
               ['up']                              6                                 193.5 KiB
                 ['bias']                          3   f32[512@model]                  1.5 KiB
                 ['kernel']                        3   f32[128,512@model]              192 KiB
               ['down']['kernel']                  3   f32[512@model,128]              192 KiB
           .opt_state                             21                                   781 KiB
             [0].{mu,nu}                          20                                   781 KiB
               ['norm']['bias']                    2   f32[128]                          1 KiB
               ['layers'][0..2]                   18                                   780 KiB
                 ['up']                           12                                   396 KiB
                   ['bias']                        6   f32[512]                         12 KiB
                   ['kernel']                      6   f32[128,512@model]              384 KiB
                 ['down']['kernel']                6   f32[512@model,128]              384 KiB
             [1]['layers'][0]['up']['bias']        1   f32[7]                             28 B
         [1]['tokens']                             1   i32[32@data,64]                   4 KiB

        Collectives in one step
         collective       axes          count       bytes     time   serves
         ─────────────────────────────────────────────────────────────────────────────────────────────────
         all-reduce       model             8   6.002 MiB   620 us   nets/encoder.py:12 (Encoder.__call__)
         all-gather       data         2 x 24      24 MiB    48 us   step.py:7 (loss)
         reduce-scatter   data,model        1     512 KiB    30 us   output
         total                             11    30.5 MiB   698 us

        Computed in full on every device:
          sort f32[1000] at step.py:9:4 (loss): its rule keeps every dimension whole
        """,
    )


@pytest.mark.parametrize(
    ("bound", "rewrites", "said"),
    [
        (2.5e-3, (), "2.5 ms: as written, no plan for this mesh and machine is more than 20.00% faster"),
        (2.5e-3, (MERGED,), "2.5 ms: as rewritten, no plan for this mesh and machine is more than 20.00% faster"),
        (3e-3, (MERGED,), "3 ms: as rewritten, no plan for this mesh and machine is faster"),
        (1.4e-3, (), None),
        (0.0, (), None),
    ],
)
def test_a_bound_is_of_the_program_as_it_is_planned_and_told_where_it_says_something(bound, rewrites, said):
    text = str(plan_of(STATE, predicted=Predicted(3e-3, 2e-3, 1e-3, 2**29, 1.5e9, (), bound), rewrites=rewrites))
    assert [line.removeprefix("  lower bound  ") for line in text.splitlines() if "lower bound" in line] == (
        [said] if said else []
    )
    assert "optimum" not in text


@pytest.mark.parametrize(
    ("searched", "said"),
    [
        (Searched(("x=8",)), "1 mesh, exactly; none rewritten"),
        (Searched(("x=8",), ("x=4, y=2",), allowed=32), "1 of 2 meshes, exactly; no rewrite was worth a plan"),
        (
            Searched(("x=8", "x=4, y=2"), (), ("x=4, y=2",), 5, 32),
            "2 meshes, 1 of them not exactly; 5 of 32 rewritten programs",
        ),
        (
            Searched(("x=8", "x=4, y=2"), (), ("x=8", "x=4, y=2"), 32, 32, True),
            "2 meshes, not exactly; 32 of 32 rewritten programs, where the budget ended",
        ),
    ],
)
def test_what_was_searched(searched, said):
    assert f"  searched     {said}\n" in str(plan_of(STATE, searched=searched))


def test_a_plan_that_does_not_fit_names_the_largest_tensors():
    text = str(plan_of(STATE, memory_limit=2.0**28))
    assert "peak memory  512 MiB of 256 MiB per device  DOES NOT FIT; largest at the peak:" in text
    assert "     256 MiB  activations f32[512,512]" in text


def test_layers_that_differ_stand_apart():
    text = str(plan_of([*layers("[0]"), leaf("[0]['layers'][3]['up']['bias']", (512,))]))
    assert "['layers']" in text
    assert "[0..2]" in text
    assert "[3]['up']['bias']" in text


def test_keys_are_not_markup():
    text = str(plan_of([leaf("[0]['[red]']", (8,), "data"), leaf("[0][':key:']", (8,), "model")]))
    assert "['[red]']" in text
    assert "[':key:']" in text


def test_compare_shows_what_differs():
    ours = plan_of(STATE)
    theirs = plan_of([x for x in STATE if "norm" not in x.path] + list(layers("[2]")), label="dp(data,model)")
    same(
        compare(ours, theirs),
        """
                                                   this plan         other plan
         ──────────────────────────────────────────────────────────────────────────────
         mesh                                      data=2, model=4   data=2, model=4
         machine                                   h100:8            h100:8
         found by                                  search            dp(data,model)
         step                                      3 ms              3 ms
         compute                                   2 ms              2 ms
         exposed communication                     1 ms              1 ms
         peak memory                               512 MiB           512 MiB
         [0]
           .params['norm']['{bias,scale}']         f32[128]          missing
           .opt_state[0].{mu,nu}['norm']['bias']   f32[128]          missing
         [2]['layers'][0..2]
           ['up']
             ['bias']                              missing           f32[512@model]
             ['kernel']                            missing           f32[128,512@model]
           ['down']['kernel']                      missing           f32[512@model,128]
        """,
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (1.5, "1.5 s"), (2.5e-3, "2.5 ms"), (3e-6, "3 us"), (4e-8, "4e-08 s")]
)
def test_seconds(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**41, "2 TiB")])
def test_size(value, text):
    assert size(value) == text


def test_short_source():
    assert short_source(LINE) == "nets/encoder.py:12 (Encoder.__call__)"
    assert short_source("C:\\me\\step.py:7:1 (loss)") == "me/step.py:7 (loss)"
    assert short_source("output") == "output"


def test_a_real_plan_is_narrow_and_names_the_users_lines():
    """Layers of Flax and the arithmetic of optax are reported where the user calls them."""
    module = nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(module)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(x) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    batch = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    options = unity.Options(cache=None)
    plan = unity.plan(step, params, jax.eval_shape(optimizer.init, params), batch, machine="cpu:8", options=options)
    assert plan.predicted.collectives
    text = str(plan)
    assert max(map(len, text.splitlines())) <= WIDTH
    sources = {c.source for c in plan.predicted.collectives}
    assert {source for source in sources if "test_table.py" not in source and source != "output"} == set()
