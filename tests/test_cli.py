"""The command line: the same functions, clear errors, exit statuses."""

import re
import subprocess
import sys

import jax
import pytest

import unity_jax as unity
from unity_jax.calibration import calibration
from unity_jax.calibration.measure import Effort
from unity_jax.cli import main
from unity_jax.machine.machine import Machine
from unity_jax.plan import verify

tpu = pytest.mark.extra("tpu-aot")
SCRIPT = """\
import jax
import jax.numpy as jnp

import helper  # a neighbour of the script
import unity_jax as unity


def step(w, x):
    return [w_ - 0.1 * g for w_, g in zip(w, jax.grad(lambda w: ((jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean())(w))]


def args(batch):
    return [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2, jax.ShapeDtypeStruct((batch, 256), jnp.float32)


def plain():
    return step, args(helper.BATCH)


def decorated(batch="64"):
    return unity.auto_shard(step, donate_argnums=0), list(args(int(batch)))


def wrong():
    return step


def broken():
    raise ValueError("the user's own")
"""


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("UNITY_JAX_CACHE", "")
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train_for_cli.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("BATCH = 32\n")
    yield str(tmp_path / "train_for_cli.py")
    for name in ("train_for_cli", "helper"):
        sys.modules.pop(name, None)


def run(capsys, *arguments):
    """Exit status, standard output, standard error."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_plan(capsys, script, tmp_path):
    out = tmp_path / "plan.json"
    status, text, _ = run(capsys, "plan", f"{script}:plain", "--machine", "h100:2x4", "--out", str(out))
    assert status == 0
    assert text.startswith("Plan of step for h100:2x4: mesh (")
    assert text.endswith(f"written to {out}\n")
    plan = unity.Plan.load(out)
    assert plan.axes.num_devices == 8
    assert [leaf.shape for leaf in plan.inputs] == [(256, 256), (256, 256), (32, 256)]


def test_words_go_to_the_factory_and_donation_stays(capsys, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a module in the current folder
    out = str(tmp_path / "plan.json")
    assert run(capsys, "plan", "train_for_cli:decorated", "128", "--machine", "v5e:2x4", "--out", out)[0] == 0
    plan = unity.Plan.load(out)
    assert plan.inputs[-1].shape == (128, 256)
    status, text, _ = run(capsys, "explain", f"{script}:decorated", "128", "--plan", out, "--at", "[0][1]")
    assert status == 0
    assert text.startswith("[0][1]: f32[256")
    status, _, error = run(capsys, "explain", f"{script}:decorated", "--plan", out)
    assert status == 2 and "the plan is for another signature of step" in error  # 64 is not 128


def test_the_zoo(capsys):
    status, text, _ = run(capsys, "plan", "models:step", "mlp", "tiny", "--machine", "v5e:2x4")
    assert status == 0
    assert text.startswith("Plan of train_step for v5e:2x4")


def test_a_machine_file(capsys, script, tmp_path):
    path = str(tmp_path / "mine.json")
    Machine("mine", Machine.preset("h100:4").devices, Machine.preset("h100:4").network).save(path)
    status, text, _ = run(capsys, "plan", f"{script}:plain", "--machine", path)
    assert status == 0 and text.startswith("Plan of step for mine: mesh (")


def test_sweep(capsys, script):
    status, text, _ = run(capsys, "sweep", f"{script}:plain", "--machine", "v5e", "--devices", "2,4,8")
    assert status == 0
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert text.startswith("Plans of step for v5e:1x2, v5e:2x2, v5e:2x4")
    assert [row[0] for row in rows] == ["2", "4", "8"]
    efficiencies = [float(row[-1].rstrip("%")) for row in rows]
    assert efficiencies[0] == 100 and efficiencies == sorted(efficiencies, reverse=True)


def test_sweep_with_work_for_each_device(capsys, script):
    """The script's batch is the word: so many rows for so many devices."""
    arguments = ["sweep", f"{script}:decorated", "{devices}", "--machine", "h100", "--devices", "64,256"]
    status, text, _ = run(capsys, *arguments, "--memory-limit", "1e9")
    assert status == 0
    efficiencies = [float(line.split()[-1].rstrip("%")) for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert efficiencies[0] == 100 and 25 < efficiencies[1] <= 100  # the same work each, and more to communicate


def test_sweep_over_memory_limits(capsys):
    words = ["tests.residuals.cli_step:layers", "--machine", "h100", "--devices", "8"]
    status, text, _ = run(capsys, "sweep", *words, "--memory-limit", "1GiB,16MiB,1KiB")
    assert status == 1 and "limit" in text
    free, saving, none = (line for line in text.splitlines() if line.strip().startswith("8 "))
    assert "1 GiB" in free and "recomputes" not in free and "100%" in free
    assert "16 MiB" in saving and "recomputes" in saving and "!" not in saving
    assert "1 KiB" in none and "!" in none


def test_a_plan_is_compiled_where_it_is_asked_for(capsys, script):
    status, text, _ = run(capsys, "plan", f"{script}:decorated", "--machine", "cpu:8", "--verify")
    assert status == 0 and "; compiled\n" in text
    status, _, error = run(capsys, "plan", f"{script}:plain", "--machine", "v100-summit:1x6", "--verify")
    assert status == 2 and re.search("compile_candidates=1: (nothing compiles for 'v100-summit:1x6'|.*gpu-aot)", error)


def test_a_plan_that_does_not_fit(capsys, script):
    status, text, _ = run(capsys, "plan", f"{script}:plain", "--machine", "v5e:2x2", "--memory-limit", "1KiB")
    assert status == 1 and "of 1 KiB per device  DOES NOT FIT" in text


def test_what_is_in_memory(capsys, script):
    status, text, _ = run(capsys, "plan", f"{script}:plain", "--machine", "v5e:2x2", "--memory", "--memory-limit", "8G")
    assert status == 0 and "of 7.451 GiB per device" in text
    assert "Memory of step on each device: " in text and "train_for_cli.py:9" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "unity: error: the following arguments are required: COMMAND"),
        (["fly"], "unity: error: argument COMMAND: invalid choice: 'fly'"),
        (["plan", "{script}"], "unity plan: error: argument FACTORY: '{script}' is not module:name or"),
        (["plan", "no_such:step"], "unity plan: error: argument FACTORY: cannot import 'no_such'"),
        (["plan", "no_such.py:step"], "unity plan: error: argument FACTORY: there is no file 'no_such.py'"),
        (["plan", "{script}:nothing"], "unity plan: error: argument FACTORY: {script} has no function 'nothing'"),
        (["plan", "{script}:wrong"], "argument FACTORY: {script}:wrong returned function, not (train_step, args)"),
        (["plan", "{script}:plain", "more"], "argument WORD: {script}:plain takes other words: too many positional"),
        (["plan", "models:step", "none"], "argument WORD: no model 'none'; there are: a3c"),
        (["plan", "{script}:plain", "--machine", "abacus:8"], "argument --machine: unknown machine 'abacus'"),
        (["plan", "{script}:plain", "--machine", "no.json"], "argument --machine: there is no machine file 'no.json'"),
        (["plan", "{script}:plain", "--memory-limit", "16 apples"], "argument --memory-limit: '16 apples' is not"),
        (["plan", "{script}:plain", "--memory-limit", "-1"], "argument --memory-limit: '-1' is not a positive"),
        (["plan", "{script}:plain", "--machine", "cpu:2", "--out", "no/such/p"], "argument --out: [Errno 2] No such"),
        (["explain", "{script}:plain", "--machine", "cpu:2", "--at", "nowhere"], "argument --at: no argument and no"),
        (["explain", "{script}:plain", "--plan", "{script}"], "argument --plan: '{script}' is not a plan file"),
        (["verify", "{script}:plain"], "unity verify: error: the following arguments are required: --topology"),
        (["verify", "{script}:plain", "--topology", "h100:0"], "argument --topology: no GPU topology is called"),
        (["sweep", "{script}:plain", "--machine", "v5e", "--devices", "8,x"], "'8,x' is not numbers of devices"),
        (["sweep", "{script}:plain", "--machine", "v9", "--devices", "8"], "--devices: unknown machine 'v9'"),
        (["sweep", "{script}:plain", "--machine", "h100", "--devices", "12"], "12 devices of h100 are no whole"),
        (["calibrate"], "unity calibrate: error: the following arguments are required: --out"),
    ],
)
def test_errors_are_one_line_that_names_the_argument(capsys, script, arguments, message):
    status, _, error = run(capsys, *(a.format(script=script) for a in arguments))
    assert status == 2
    assert message.format(script=script) in error
    assert error.count("\n") == 1


def test_errors_of_the_users_code_are_theirs(script):
    with pytest.raises(ValueError, match="the user's own"):
        main(["plan", f"{script}:broken"])


def test_verify(capsys, script, monkeypatch):
    monkeypatch.setattr("unity_jax.cli.topology", lambda name: jax.devices())
    monkeypatch.setattr(verify, "topology", lambda name: jax.devices())
    status, text, _ = run(capsys, "verify", f"{script}:decorated", "--topology", "here:8")
    assert status == 0
    assert text.startswith("step compiled for here:8: mesh (")
    assert "exactly as planned" in text
    status, _, error = run(capsys, "verify", f"{script}:plain", "--topology", "here:8", "--machine", "v5e:2x2")
    assert status == 2 and "argument --topology: here:8 has 8 devices, the plan is for 4: name one of that" in error
    assert run(capsys, "verify", f"{script}:plain", "--topology", "here:8", "--memory-limit", "1000")[0] == 1


@tpu
def test_verify_for_a_tpu(capsys):
    status, text, _ = run(capsys, "verify", "models:step", "mlp", "tiny", "--topology", "v5e:2x2")
    assert status == 0
    assert "by the compiler's own estimate" in text


def test_calibrate(capsys, tmp_path, monkeypatch):
    tiny = Effort(("float32",), ((16, 16),), 2.0**16, (2**12,), (2**10, 2**12), 1, 1e-3)
    monkeypatch.setattr(calibration, "effort", lambda platform: tiny)
    out = tmp_path / "profile.json"
    status, text, _ = run(capsys, "calibrate", "--out", str(out))
    assert status == 0
    assert text.startswith("cpu:8 measured: 8 devices")
    assert Machine.load(out).num_devices == 8


def test_as_a_program(script):
    command = [sys.executable, "-W", "error", "-m", "unity_jax", "plan", f"{script}:plain", "--machine", "v5e:2x2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan of step for v5e:2x2: mesh (")
