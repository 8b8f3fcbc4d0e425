"""`nnx` objects in every stage of a decorated function, and what happens to the objects themselves."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import unity_jax as unity
from tests.api.steps import close
from tests.api.test_nnx_objects import ADAM, MLP, classifier, examples, train_step, update

pytestmark = pytest.mark.usefixtures("no_rewrites")


def trained(make=classifier, step=train_step, count=1):
    objects = make()
    losses = [float(nnx.jit(step)(*objects, examples(i))) for i in range(count)]
    return objects, losses


# Stages


def test_planned_from_shapes_born_sharded_and_run(sharded):
    """The objects are made anew, with another optimizer function each time, and the plan is still the first."""

    def make():
        model = MLP(nnx.Rngs(0))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), metrics

    step = sharded(train_step)
    plan = step.plan(*nnx.eval_shape(make), examples())
    layouts = [leaf.layout for leaf in plan.inputs]
    model, optimizer, metrics = step.init(make)
    assert isinstance(model, MLP) and isinstance(optimizer, nnx.Optimizer)
    arrays = jax.tree.leaves(nnx.state((model, optimizer, metrics)))
    assert [x.sharding.spec for x in arrays] == [x.spec() for x in layouts[: len(arrays)]]
    assert len(model.linear1.kernel[...].sharding.device_set) == 8
    assert not model.linear1.kernel[...].sharding.is_fully_replicated
    expected, losses = trained(count=2)
    assert np.allclose([step(model, optimizer, metrics, step.shard(examples(i))) for i in range(2)], losses, rtol=1e-4)
    assert [leaf.layout for leaf in step._known[-1].inputs] == layouts and step._known[-1].record == plan.record
    close(nnx.state((model, optimizer, metrics)), nnx.state(expected), rtol=2e-4)
    before = arrays[0].sharding
    assert model.linear1.bias[...].sharding == before  # nothing moves between steps


def test_objects_in_another_order_and_random_streams_in_init(sharded):
    step = sharded(train_step)
    step.plan(*nnx.eval_shape(classifier), examples())

    def make(rngs):
        model = MLP(rngs)
        return {"optimizer": nnx.Optimizer(model, ADAM, wrt=nnx.Param), "model": model}

    rngs = nnx.Rngs(0)
    made = step.init(make, rngs)
    reference = nnx.Rngs(0)
    MLP(reference)
    close(nnx.state(rngs), nnx.state(reference))
    close(nnx.state(made["model"]), nnx.state(MLP(nnx.Rngs(0))))
    assert not made["model"].linear1.kernel[...].sharding.is_fully_replicated
    with pytest.raises(unity.PlanError, match=r"shard: argument 0 of train_step is an nnx object: .init builds it"):
        step.shard(made["model"], 0)
    with pytest.raises(unity.PlanError, match=r"init: no argument of train_step has a leaf .other.bias"):
        step.init(lambda: nnx.Dict(other=nnx.Linear(3, 3, rngs=nnx.Rngs(0))))


def test_saved_plan_and_checkpoint(sharded, tmp_path):
    step = sharded(train_step)
    plan = step.plan(*nnx.eval_shape(classifier), examples())
    plan.save(tmp_path / "plan.json")
    loaded = sharded(train_step, plan=unity.Plan.load(tmp_path / "plan.json"))
    objects, losses = classifier(), trained()[1]
    assert np.allclose(loaded(*objects, examples()), losses[0], rtol=1e-5)
    assert str(loaded._known[0].layouts()) == str(plan.layouts())
    model = plan.abstract_state(0)
    assert isinstance(model, MLP)
    restored = jax.tree.map(lambda s, x: jax.device_put(x, s.sharding), nnx.state(model), nnx.state(objects[0]))
    assert jax.tree.leaves(restored)[1].sharding == nnx.state(plan.in_shardings[0])["linear1"]["kernel"].get_raw_value()
    nnx.update(model, restored)
    assert model(examples()["x"]).shape == (16, 8)


def test_traced_lowered_and_compiled(sharded):
    step, objects = sharded(train_step, donate_argnums=(0, 1)), classifier()
    assert len(step.trace(*objects, examples()).jaxpr.eqns) > 10
    step.plan(*objects, examples())
    objects = step.init(classifier)
    compiled = step.lower(*objects, examples()).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    losses = [compiled(*objects, step.shard(examples(i))) for i in range(2)]
    expected, reference = trained(count=2)
    assert np.allclose(losses, reference, rtol=1e-4)
    close(nnx.state(objects), nnx.state(expected), rtol=2e-4)


def test_pins_and_arguments_by_name(sharded):
    def step(model, *, optimizer, batch, scale):
        (loss, _), grads = nnx.value_and_grad(lambda m: (scale * m(batch["x"]).var(), None), has_aux=True)(model)
        optimizer.update(model, grads)
        return loss, model

    def make():
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    # The optimizer is free; a pin of the results is one of the result alone, not of the updated arguments.
    decorated = sharded(step, static_argnames="scale", in_shardings=jax.P("x"), out_shardings=(jax.P(), None))
    (model, optimizer), (other, reference) = make(), make()
    for scale in (1, 2):
        loss, returned = decorated(model, optimizer=optimizer, batch=examples(), scale=scale)
        wanted, _ = nnx.jit(step, static_argnames="scale")(other, optimizer=reference, batch=examples(), scale=scale)
        close(loss, wanted, rtol=2e-4)
        assert returned is model and model.kernel[...].sharding.spec == jax.P("x")
    assert len(decorated._known) == 2
    assert "['optimizer'].opt_state[0].mu.kernel" in decorated._known[0].program.in_paths
    close(nnx.state((model, optimizer)), nnx.state((other, reference)), rtol=2e-4)


def test_annotations_of_variables_are_pins(make_mesh):
    """`nnx.with_partitioning`, as an abstract model carries it."""

    def make():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        model = nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    step = unity.auto_shard(update)
    with jax.set_mesh(make_mesh(data=2, model=4)):
        plan = step.plan(*nnx.eval_shape(make), examples())
        model, optimizer = step.init(make)
        loss, (expected, losses) = step(model, optimizer, examples()), trained(make, update)
    kernel = next(leaf for leaf in plan.inputs if leaf.path == "[0].kernel")
    assert kernel.layout.spec() == model.kernel[...].sharding.spec == jax.P(None, "model")
    assert np.allclose(loss, losses[0], rtol=1e-5)
    close(nnx.state((model, optimizer)), nnx.state(expected), rtol=2e-4)


# The objects


def test_donation_is_that_of_nnx_jit(sharded):
    def old(step):
        objects = classifier()
        if step is not plain:  # where they are planned to lie
            objects = step.init(classifier)
        arrays = [objects[0].linear1.kernel[...], objects[1].opt_state[0].mu["linear1"]["kernel"][...]]
        step(*objects, examples())
        return [x.is_deleted() for x in arrays]

    plain = nnx.jit(train_step, donate_argnums=0)
    step = sharded(train_step, donate_argnums=0)
    step.plan(*nnx.eval_shape(classifier), examples())
    assert old(step) == old(plain) == [True, False]


def test_objects_made_changed_and_returned(sharded):
    """New attributes, lost ones, static ones, and objects that are born in the function."""

    def grow(model, x):
        model.scale = nnx.Param(jnp.full(8, 2.0))
        model.trained = True
        del model.linear2.bias
        model.linear2.bias = None
        statistics = nnx.metrics.Average("x")
        statistics.update(x=model.linear1(x))
        return {"model": model, "statistics": statistics, "mean": x.mean()}

    def create():
        return MLP(nnx.Rngs(3))

    x = examples()["x"]
    found, expected = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(0))
    ours, theirs = sharded(grow)(found, x), nnx.jit(grow)(expected, x)
    assert ours["model"] is found and found.trained and found.linear2.bias is None and found.scale.shape == (8,)
    close(nnx.state(ours["model"]), nnx.state(theirs["model"]))
    close(nnx.state(ours["statistics"]), nnx.state(theirs["statistics"]))
    assert nnx.graphdef(found) == nnx.graphdef(expected)
    close(nnx.state(sharded(create)()), nnx.state(create()))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_intermediates_are_sown(sharded):
    class Sower(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", x)
            return x.sum()

    def step(model, x):
        return model(x)

    found, expected, decorated = Sower(nnx.Rngs(0)), Sower(nnx.Rngs(0)), sharded(step)
    for _ in range(2):
        close(decorated(found, examples()["x"]), nnx.jit(step)(expected, examples()["x"]), rtol=2e-4)
        close(nnx.pop(found, nnx.Intermediate), nnx.pop(expected, nnx.Intermediate), rtol=2e-4)
    assert len(decorated._known) == 1


def test_variables_and_cached_arguments(sharded):
    def step(count, model, optimizer, batch):
        count[...] += 1
        return update(model, optimizer, batch)

    def make():
        model = MLP(nnx.Rngs(0))
        return nnx.Variable(jnp.zeros((), jnp.int32)), model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    found, (expected, losses) = make(), trained(make, step, 2)
    cached = nnx.cached_partial(sharded(step), *found)
    assert np.allclose([cached(examples(i)) for i in range(2)], losses, rtol=1e-4)
    assert int(found[0][...]) == 2
    close(nnx.state(found), nnx.state(expected), rtol=2e-4)


def test_inside_other_transformations(sharded):
    """A planned function of objects is one of the parts of `nnx.jit` and `nnx.grad`."""

    def loss(model, batch):
        model.calls[...] += 1
        return (model(batch["x"]) ** 2).mean()

    def make():
        model = MLP(nnx.Rngs(0))
        model.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        return model

    inner, model, expected = sharded(loss), make(), make()
    found = nnx.jit(lambda m, b: nnx.grad(inner)(m, b))(model, examples())
    close(found, nnx.grad(loss)(expected, examples()), rtol=2e-4)
    assert int(model.calls[...]) == int(expected.calls[...]) == 1


# What is refused


def test_errors_name_the_argument(sharded):
    def step(x, models):
        return x.sum()

    class Unhashable(nnx.Module):
        def __init__(self):
            self.sizes = nnx.static([1, 2])

    class Reference(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(8), ref=True)

    class Text(nnx.Module):
        def __init__(self):
            self.words = nnx.Variable("words")

    x = np.ones(8, np.float32)
    with pytest.raises(TypeError, match=r"argument \[1\]\['a'\]: .*Unhashable has the static attribute 'sizes'"):
        sharded(step)(x, {"a": Unhashable()})
    with pytest.raises(unity.UnsupportedError, match=r"argument \[1\]\[0\].w is a jax.Ref"):
        sharded(step)(x, [Reference()])
    with pytest.raises(unity.UnsupportedError, match=r"argument \[1\].words is 'words' of type str"):
        sharded(step)(x, Text())
    donated = sharded(step, donate_argnums=1)
    model = MLP(nnx.Rngs(0))
    model.linear1.kernel[...].delete()
    with pytest.raises(ValueError, match=r"argument \[1\].linear1.kernel has been deleted"):
        donated(x, model)


def test_flax_is_not_needed():
    """Neither to import the library nor to run a step."""
    code = (
        "import sys, jax, unity_jax as unity\n"
        "step = unity.auto_shard(lambda w, x: (w - x, (w * x).sum()))\n"
        "step(jax.numpy.ones(8), jax.numpy.ones(8))\n"
        "assert not any(m.split('.')[0] == 'flax' for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
