"""The table of tuned blocks, and the command that makes it."""

import csv
import itertools
import os
import subprocess
import sys

import pytest

from unity_jax import cli
from unity_jax.aot import tune
from unity_jax.kernels.grid import TUNED, Blocks, best
from unity_jax.kernels.spec import Spec


@pytest.fixture(scope="module")
def rows():
    with TUNED.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_kernel_has_its_blocks(rows):
    assert [(row["form"], row["kernel"]) for row in rows] == list(itertools.product(tune.FORMS, tune.KERNELS))
    for row in rows:
        causal, keep = tune.FORMS[row["form"]]
        assert best(Spec(1.0, bool(causal), keep), row["kernel"], "tpu") == (int(row["queries"]), int(row["keys"]))
    assert best(Spec(), "forward", "gpu") == Blocks(64, 64)


def test_on_all_devices_together_none_is_slower_than_with_blocks_of_512(rows):
    for row in rows:
        ratio = 1.0
        for on in ("v5e", "v5p", "v6e"):
            ratio *= float(row[f"{on} ms"]) / float(row[f"{on} ms by 512"])
        assert ratio <= 1


@pytest.mark.extra("tpu-aot")
def test_the_table_says_what_the_compiler_schedules(rows):
    """In another process: libtpu reads its flags when it is loaded."""
    program = """
from unity_jax.aot import tune
from unity_jax.aot.bundles import written
from unity_jax.kernels.grid import Blocks
with written():
    for form in ("causal", "all keys, dropout"):
        for kernel, milliseconds in tune.milliseconds(form, "v5e:2x4", Blocks(512, 512)).items():
            print(form, kernel, f"{milliseconds:.4g}", sep="; ")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", program]
    said = subprocess.run(run, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    forms = [row for row in rows if row["form"] in ("causal", "all keys, dropout")]
    assert said.stdout.splitlines() == [f"{row['form']}; {row['kernel']}; {row['v5e ms by 512']}" for row in forms]


def test_what_cannot_be_compiled_for_is_said(capsys):
    with pytest.raises(SystemExit):
        cli.main(["kernels", "tune", "--on", "v5x:2x4"])
    assert "argument --on" in capsys.readouterr().err
