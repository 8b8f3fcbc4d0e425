"""The zoo: published parameter counts, stable state, double precision throughout, and losses that fall."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models import bert, gpt, moe, t5
from models._common import make_precision
from tests.numerics.steps import fresh_state

NAMES = models.names()
FROZEN = ("lora",)  # what is not trained are weights

CRITIC = [(64, 128), (128, 256), (256, 512), (512, 512)]  # channels of the blocks of WGAN-GP
GENERATOR = [(512, 512), (512, 256), (256, 128), (128, 64)]

# Counts found in the literature or in released checkpoints, else derived by the formula in the comment.
PARAMETERS = {
    # Encoder and pooler 335,141,888; masked-LM head 1024^2 + 1024 + 2 x 1024 + 30,522; next sentence 2 x 1024 + 2.
    ("bert", "full"): 336_226_108,
    ("bert", "base"): 110_106_428,
    # V D + T D + L (12 D^2 + 13 D) + 2 D; GPT-2 as released, GPT-3 rounds to table D.1 of its paper.
    ("gpt", "gpt2"): 124_439_808,
    ("gpt", "gpt2-xl"): 1_557_611_200,
    ("gpt", "gpt3-1.3b"): 1_315_723_264,
    ("gpt", "gpt3-2.7b"): 2_651_553_280,
    ("gpt", "gpt3-6.7b"): 6_658_404_352,
    ("gpt", "gpt3-13b"): 12_853_386_240,
    ("gpt", "megatron-22b"): 22_074_273_792,
    ("gpt", "opt-30b"): 29_974_540_288 - 2 * 7168,  # two positions fewer than the checkpoint
    ("gpt", "alpa-39b"): 39_087_652_864,
    ("gpt", "opt-66b"): 65_719_683_072,
    ("gpt", "gpt3-175b"): 174_604_259_328,
    # The released checkpoints: (1 if tied else 2) V D + L (2 D^2 + 2 D K W + 3 D F + 2 D) + D; 2.7b and 22b by that.
    ("llama", "1.3b"): 1_345_423_360,
    ("llama", "2.7b"): 2_701_560_320,
    ("llama", "7b"): 6_738_415_616,
    ("llama", "13b"): 13_015_864_320,
    ("llama", "22b"): 22_137_083_904,
    ("llama", "33b"): 32_528_943_616,
    ("llama", "65b"): 65_285_660_672,
    ("llama", "llama2-70b"): 68_976_648_192,
    ("llama", "llama3-8b"): 8_030_261_248,
    ("llama", "llama3-70b"): 70_553_706_496,
    ("llama", "llama3-405b"): 405_853_388_800,
    ("llama", "llama3.2-1b"): 1_235_814_400,
    ("llama", "llama3.2-3b"): 3_212_749_824,
    # The released checkpoints, which store the tied embedding, V D, twice.
    ("falcon", "7b"): 7_217_189_760 - 65_024 * 4544,
    ("falcon", "40b"): 41_835_970_560 - 65_024 * 8192,
    ("falcon", "180b"): 179_522_565_120 - 65_024 * 14_848,
    # The released checkpoints.
    ("t5", "small"): 60_506_624,
    ("t5", "base"): 222_903_552,
    ("t5", "large"): 737_668_096,
    ("t5", "3b"): 2_851_598_336,
    ("t5", "11b"): 11_307_321_344,
    ("t5", "v1.1-small"): 76_961_152,
    ("t5", "v1.1-base"): 247_577_856,
    ("t5", "v1.1-large"): 783_150_080,
    ("t5", "v1.1-xl"): 2_849_757_184,
    ("t5", "v1.1-xxl"): 11_135_332_352,
    # V D + L (4 D^2 + 2 D F + F + 5 D) + L (8 D^2 + 2 D F + F + 7 D); table 3 has 65 M and 213 M.
    ("transformer", "base"): 63_045_632,
    ("transformer", "full"): 214_171_648,
    # An LSTM of inputs I: 4 H (I + H + 1). Encoder: two with I = H, one 2 H, one H for each later layer; decoder: one
    # H, the rest 2 H; attention 2 H^2 + 2 H + 1; embedding and output 2 V H + V.
    ("seq2seq", "full"): 160_634_433,
    ("seq2seq", "nmt"): 30_736_165,
    # Convolutions 41 x 11 x 32 + 21 x 11 x 32^2, layers (1312 + 6 H) H + 14 H^2, dense H^2, norms 2 (32 + 32 + 8 H),
    # output 29 (H + 1); the paper has 68 M.
    ("deep_speech", "full"): 67_689_053,
    ("deep_speech", "small"): 36_394_493,
    # 1024 x 8192 + 15 x 8192^2, and 2 (1024 x 8192 + 7 x 8192^2).
    ("mlp", "full"): 1_015_021_568,
    ("mlp", "towers"): 956_301_312,
    # 204,184,588 rows x 128, bottom MLP 171,392, top MLP 2,197,505 (479 inputs: 128 + 27 x 26 / 2).
    ("dlrm", "full"): 204_184_588 * 128 + 171_392 + 2_197_505,
    # Rows x width, bottom and top MLP; the inputs of the top are 16 + 351, 64 + 351 and 25 x 64.
    ("dlrm", "kaggle"): 33_762_577 * 16 + 155_984 + 320_001,
    ("dlrm", "terabyte"): 49_126_297 * 64 + 154_944 + 607_233,
    ("dlrm", "unity-24"): 24_000_000 * 64 + 328_768 + 3_739_649,
    # Unity's towers (942 + 2 x 5270 + 2 x 2048) 4192 + 5 x 7 x 4192^2 + (5 x 4192 + 2) 4192 + 3 x 4192^2 + 4192;
    # the benchmark's as its own run prints it (Pilot1/Uno/save, 2018).
    ("candle_uno", "full"): 15_578 * 4192 + 35 * 4192**2 + 20_962 * 4192 + 3 * 4192**2 + 4192,
    ("candle_uno", "benchmark"): 38_094_001,
    # torchvision's `inception_v3`, with the auxiliary head and without. Unity's has 17,216 biases where that has twice
    # as many norm parameters, and 10 classes: 990 x 2049 fewer.
    ("inception", "full"): 27_161_264,
    ("inception", "plain"): 23_834_568,
    ("inception", "unity"): 23_834_568 - 17_216 - 990 * 2049,
    # 8^2 x 4 x 16 + 16, 4^2 x 16 x 32 + 32, 2592 x 256 + 256, LSTM 4 x 256 (2 x 256 + 1), heads 256 x 19 + 19.
    ("a3c", "full"): 4112 + 8224 + 663_808 + 525_312 + 4883,
    ("a3c", "feed_forward"): 4112 + 8224 + 663_808 + 4883,
    # ResNet-101 without its classifier (44,549,160 - 2,049,000); proposals 9 x 1024 x 512 + 512 and 45 x 513; head
    # 105 x 2049.
    ("faster_rcnn", "full"): 42_500_160 + 4_719_104 + 45 * 513 + 105 * 2049,
    # torchvision's `resnet50` and `resnet18` (101 and 152 are more of the same blocks).
    ("resnet", "full"): 25_557_032,
    ("resnet", "18"): 11_689_512,
    ("resnext", "full"): 25_028_904,
    # Per level two 3x3 from a to b, on the way back after a transposed 2x2; 1x1 to two classes.
    ("unet", "full"): sum(9 * (a + b) * b + 2 * b for a, b in [(1, 64), (64, 128), (128, 256), (256, 512), (512, 1024)])
    + sum(4 * a * b + b + 9 * (a + b) * b + 2 * b for a, b in [(1024, 512), (512, 256), (256, 128), (128, 64)])
    + 130,
    # torchvision's `vit_l_16`, `vit_b_16` and `vit_h_14`.
    ("vit", "full"): 304_326_632,
    ("vit", "base"): 86_567_656,
    ("vit", "huge"): 632_045_800,
    # Of a block from a to b: two norms, 3x3, 3x3, 1x1. Generator: 129 x 8192 first, norm and 3x3 to 3 last; critic: 3x3
    # from 3 first, 8192 last.
    ("wgan", "full"): 129 * 8192
    + sum(2 * (a + b) + 9 * a * b + 9 * b * b + a * b for a, b in GENERATOR)
    + (2 * 64 + 27 * 64 + 3)
    + (27 * 64 + 64 + 8192)
    + sum(4 * a + 9 * a * a + 9 * a * b + b + a * b + b for a, b in CRITIC),
    # 4 tables of 10^6 x 64, then 256 x 256 + 256 x 256 + 256 x 2.
    ("xdl", "full"): 256_000_000 + 2 * 256**2 + 512,
    # 2 x 10,000 x 1500 + 10,000 in the embedding and output, 2 x (2 x 1500 x 6000 + 6000) in the layers.
    ("lstm_lm", "full"): 66_022_000,
    ("lstm_lm", "medium"): 19_775_200,
    # L (2 D^2 + 2 D x 1024 + 8 D + 24 D F + 2 D) + 2 V D + D.
    ("moe", "full"): 46_702_792_704,
}


# What optax computes in float32 whatever the model's dtype: Adafactor's decay (a scalar), and the CTC loss's zeros and
# ones where a letter is repeated.
SINGLE = {"t5", "deep_speech"}


def avals(tree):
    """Path -> (shape, dtype, weak type) of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype, getattr(x, "weak_type", False)) for path, x in leaves}


def floats(jaxpr):
    """The floating dtypes of all values computed in a jaxpr, sub-jaxprs included."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {v.aval.dtype for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)}
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= floats(inner)
    return found


@pytest.mark.parametrize(("name", "size"), PARAMETERS)
def test_parameter_counts_are_the_published_ones(name, size):
    model = models.get(name, size)
    assert model.num_parameters == PARAMETERS[name, size]
    assert model.published_parameters in (None, model.num_parameters)


def test_mixtral_8x22b_has_its_published_count():
    one, two = (models.get("moe", "8x22b", layers=layers).num_parameters for layers in (1, 2))  # quicker than all 56
    published = models.get("moe", "8x22b").published_parameters
    assert one + 55 * (two - one) == published == 140_620_634_112


@pytest.mark.parametrize("name", NAMES)
def test_every_model_has_a_full_and_a_tiny_size(name):
    assert {"full", "tiny"} <= set(models.sizes(name))


def test_overrides():
    deep = models.get("bert", "tiny", layers=5, batch_size=8, dropout=None)
    assert len(deep.abstract_state().params["layers"]) == 5
    assert deep.abstract_batch()["tokens"].shape == (8, 32)
    assert deep.config.dropout == 0.1
    assert models.get("bert", layers=12).published_parameters is None


def test_errors_name_the_choices():
    with pytest.raises(ValueError, match="no model 'vgg'; there are: a3c"):
        models.get("vgg")
    with pytest.raises(ValueError, match="gpt has no size 'small'; it has: full, gpt2"):
        models.get("gpt", "small")
    with pytest.raises(ValueError, match="no such override: layers; this model has: bags"):
        models.get("dlrm", layers=2)
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        models.get("mlp", "tiny", dtype=jnp.float64)


@pytest.mark.parametrize("name", NAMES)
def test_batches_match_their_spec_and_their_seed(name):
    model = models.get(name, "tiny")
    batch = model.make_batch(3)
    assert avals(batch) == avals(model.abstract_batch())
    jax.tree.map(np.testing.assert_array_equal, batch, model.make_batch(3))
    different = jax.tree.map(lambda a, b: (a != b).any(), batch, model.make_batch(4))
    assert any(jax.tree.leaves(different))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_keeps_shapes_dtypes_and_weak_types(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        model = models.get(name, "tiny", dtype=dtype)
        state, batch = model.abstract_state(), model.abstract_batch()
        after, metrics = jax.eval_shape(model.train_step, state, batch)
        assert avals(after) == avals(state)
        assert not any(weak for _, _, weak in avals(state).values())
        assert all(shape == () for shape, _, _ in avals(metrics).values())
        assert "loss" in metrics and "loss" in jax.eval_shape(model.eval_step, state, batch)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_float64_throughout(name):
    with jax.enable_x64(True):
        model = models.get(name, "tiny", dtype=jnp.float64)
        state = model.abstract_state()
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
        traced = jax.jit(model.train_step).trace(state, model.abstract_batch())
        assert dtypes == {jnp.dtype(jnp.float64)}
        assert floats(traced.jaxpr) == dtypes | ({jnp.dtype(jnp.float32)} if name in SINGLE else set())


@pytest.mark.parametrize("name", NAMES)
def test_losses_fall_and_states_are_donated(name):
    with jax.enable_x64(True):
        model = models.get(name, "tiny", dtype=jnp.float64)
        state, batch = fresh_state(model), model.make_batch(0)
        start, variables = jax.tree.leaves(state), jax.tree.map(np.array, state.variables)
        step = jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile()
        losses = []
        for _ in range(5):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    placeholders = (1,)  # Adafactor's, which no step reads
    assert all(leaf.is_deleted() or leaf.shape == placeholders for leaf in start)
    assert int(state.step) == 5
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: (a != np.asarray(b)).any(), variables, state.variables))
    assert not any(changed) if name in FROZEN else all(changed)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] * (0.99 if name in FROZEN else 0.95)  # adapters of a random model learn little


def test_abstract_state_of_gpt3_175b():
    model = models.get("gpt", "gpt3-175b")
    state = model.abstract_state()
    assert state.params["blocks"]["qkv"]["kernel"].shape == (96, 12288, 3, 96, 128)
    after, _ = jax.eval_shape(model.train_step, state, model.abstract_batch())
    assert avals(after) == avals(state)
    size = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert size > 2e12  # 12 bytes of parameters and moments for each of 174.6 G


def test_bert_large_traces_in_seconds():
    model = models.get("bert")
    traced = jax.jit(model.train_step, donate_argnums=0).trace(model.abstract_state(), model.abstract_batch())
    assert len(traced.jaxpr.eqns) < 20_000


def test_dropout_masks_change_with_the_step_and_vanish_in_evaluation():
    model = models.get("lstm_lm", "tiny", learning_rate=0.0)
    state, batch = model.make_state(0), model.make_batch(0)
    state = state._replace(variables=jax.tree.map(jnp.zeros_like, state.variables))
    step, evaluate = jax.jit(model.train_step), jax.jit(model.eval_step)
    later = state._replace(step=state.step + 1)
    first, second = (step(s, batch)[1]["loss"] for s in (state, later))
    assert first != second
    assert first == step(state, batch)[1]["loss"]
    assert evaluate(state, batch)["loss"] == evaluate(later, batch)["loss"]


def test_bert_batches_look_like_text():
    model = models.get("bert", "tiny", batch_size=64)
    batch = model.make_batch(0)
    lengths = batch["attention_mask"].sum(1)
    assert (batch["tokens"][:, 0] == bert.CLS).all()
    assert (np.take_along_axis(batch["tokens"], lengths[:, None] - 1, 1) == bert.SEP).all()
    assert (batch["tokens"][batch["attention_mask"] == 0] == bert.PAD).all()
    assert lengths.min() < lengths.max() == 32
    weights = batch["masked_weights"]
    expected = np.minimum(5, np.maximum(1, np.round(0.15 * lengths)))
    np.testing.assert_array_equal(weights.sum(1), expected)
    assert (batch["masked_tokens"][weights == 1] > bert.MASK).all()
    assert (batch["masked_positions"] < lengths[:, None]).all()
    shown = np.take_along_axis(batch["tokens"], batch["masked_positions"], 1)[weights == 1]
    assert 0.6 < (shown == bert.MASK).mean() < 0.95
    assert batch["tokens"].max() < model.config.vocabulary


def test_bert_ignores_padding():
    model = models.get("bert", "tiny")
    state, batch = model.make_state(0), model.make_batch(0)
    noisy = dict(batch, tokens=np.where(batch["attention_mask"] == 0, 7, batch["tokens"]))
    assert (noisy["tokens"] != batch["tokens"]).any()
    evaluate = jax.jit(model.eval_step)
    first, second = evaluate(state, batch), evaluate(state, noisy)
    assert 0 <= first["masked_accuracy"] <= 1
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-6)


def test_gpt_does_not_look_ahead():
    config = gpt.SIZES["tiny"]
    module = gpt.Gpt(config, make_precision(jnp.float32), nnx.Rngs(0))
    tokens = models.get("gpt", "tiny").make_batch(0)["tokens"]
    changed = tokens.copy()
    changed[:, 20:] = (changed[:, 20:] + 1) % config.vocabulary
    encode = jax.jit(lambda tokens: module.encode(tokens, None))
    before, after = encode(tokens), encode(changed)
    np.testing.assert_allclose(before[:, :20], after[:, :20], atol=1e-5)
    assert (abs(before - after)[:, 20:].max(axis=-1) > 1e-3).all()


def test_scanned_and_unrolled_layers_are_the_same_function():
    scanned, unrolled = (models.get("llama", "tiny", scan=scan) for scan in (True, False))
    state, batch = scanned.make_state(0), scanned.make_batch(0)
    layers = {i: jax.tree.map(operator.itemgetter(i), state.params["blocks"]) for i in range(2)}
    listed = state._replace(params={**state.params, "blocks": layers})
    losses = [
        jax.jit(model.eval_step)(s, batch)["loss"]
        for model, s in ((scanned, state), (unrolled, listed))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_t5_buckets_are_exact_near_by_and_logarithmic_further_away():
    near, far, count = 8, 16, 32  # of 16 buckets on each side
    both = np.asarray(t5.buckets(200, 200, count, 128, both_ways=True))
    np.testing.assert_array_equal(both[0, :near], [0, *range(17, 24)])
    np.testing.assert_array_equal(both[:near, 0], range(near))
    distance = np.array([9, 10, 13, 20, 30, 50, 100, 127, 128, 199])
    logarithmic = near + (np.log(distance / near) / np.log(128 / near) * (far - near)).astype(int)
    np.testing.assert_array_equal(both[distance, 0], np.minimum(logarithmic, far - 1))
    one = np.asarray(t5.buckets(200, 200, count, 128, both_ways=False))
    assert (one[np.triu_indices(200)] == 0).all()
    np.testing.assert_array_equal(one[:16, 0], range(16))
    assert one.max() == count - 1


def test_t5_inputs_and_targets_make_up_the_text():
    model = models.get("t5", "tiny")
    batch, (cut, spans) = model.make_batch(0), model.config.cut
    first_mark = model.config.vocabulary - spans
    for row in range(model.config.batch_size):
        halves = [list(batch[half][row]) for half in ("inputs", "targets")]
        assert all(half.pop() == t5.END for half in halves)
        marks = [[x for x in half if x >= first_mark] for half in halves]
        assert marks[0] == marks[1] == sorted(marks[0], reverse=True) and len(marks[0]) == spans
        assert len(halves[0]) == model.config.text - cut + spans and len(halves[1]) == cut + spans
        assert halves[0][0] < first_mark and halves[1][0] == marks[1][0]


@pytest.mark.parametrize("name", ["transformer", "seq2seq"])
def test_translation_ignores_source_padding(name):
    model = models.get(name, "tiny")
    state, batch = model.make_state(0), model.make_batch(0)
    short = {half: ids[:, :-2] for half, ids in batch.items()}
    long = dict(short, source=np.pad(short["source"], ((0, 0), (0, 2))))
    evaluate = jax.jit(model.eval_step)
    first, second = evaluate(state, short), evaluate(state, long)
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-5)


def test_deep_speech_ignores_padding():
    model = models.get("deep_speech", "tiny")
    state, batch = model.make_state(0), model.make_batch(0)
    longer = dict(batch, spectrogram=np.pad(batch["spectrogram"], ((0, 0), (0, 0), (0, 6))))
    step = jax.jit(model._apply)
    losses = [step(state.params, state.variables, b, jax.random.key(0))[0] for b in (batch, longer)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_moe_routes_each_token_to_its_first_free_experts():
    config = moe.SIZES["tiny"]
    layer = moe.Experts(config, make_precision(jnp.float32), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (3, config.length, config.hidden)) * 30
    dispatch, combine, balance = layer.route(x)
    probabilities = np.asarray(jax.nn.softmax(layer.router(x)))

    expected = np.zeros(dispatch.shape)
    gates = np.zeros(dispatch.shape)
    for row in range(3):
        used = np.zeros(config.experts, int)
        order = np.argsort(-probabilities[row], axis=-1)[:, : config.top_k]
        for choice in range(config.top_k):
            for token in range(config.length):
                expert = order[token, choice]
                if used[expert] < config.capacity:
                    expected[row, token, expert, used[expert]] = 1
                    total = probabilities[row, token, order[token]].sum()
                    gates[row, token, expert, used[expert]] = probabilities[row, token, expert] / total
                used[expert] += 1
    assert expected.sum() < 3 * config.length * config.top_k  # some tokens are dropped
    np.testing.assert_array_equal(dispatch, expected)
    np.testing.assert_allclose(combine, gates, rtol=1e-5)
    assert balance >= 1 - 1e-3
