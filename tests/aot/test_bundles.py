"""The length of schedules, of text as libtpu 0.0.42 writes it, cut short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unity_jax.aot.bundles import empty, scheduled_cycles, schedules, with_schedules, written
from unity_jax.aot.cycles import Cycles, estimated_cycles
from unity_jax.aot.hlo import parse

# Three bundles, a loop of 128 over two bundles and a loop of 16 over three, and its last one. Both branches have four
# bundles of delay, of which the inner loop fills one.
ROWS = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = inlined_call_operand.hbm [shape: f32[1000,64], index: 0, kind: input] }
   0x1   :  { %9 = dma.vmem_to_smem /*vmem=*/%s7, /*size_in_granules=*/32, /*smem=*/%s4, /*dst_syncflagno=*/%s5 /*
base_bounds: (256)
strides: (1) */ }
   0x2   :  { %s2 = smov 0 /* copy for cssa */ } /* Start region 384 :: Start region 388 :: End region 388 */
   0x3 LB: > { %s15 = sphi %s2, %s3 /* phi copy */ } /* Start region 393 :: Start region 8 */
   0x4   : > { %s10 = smov 0 } /* End region 8 */
   0x5 LB: >> { %s51 = sadd.s32 1, %s10 } /* Start region 382 */
   0x6   : >> { %p48_p9 = scmp.ge.s32.totalorder %s51, 16 /* loop exit test */ }
   0x7   : >> { %50 = sbr.rel (!%p48_p9) target = $region382 }
   0x8   :  {}
   0x9   :  {}
   0xa   :  {}
   0xb   : > { %s3 = sadd.s32 1, %s15 } /* End region 382 */
   0xc   : > { %p12_p6 = scmp.ge.s32.totalorder %s3, 128 /* loop exit test */ }
   0xd   :  { %14 = sbr.rel (!%p12_p6) target = $region393 }
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   :  {} /* End region 384 */
  0x12   :  {} /* exit bundle: %scatter_fusion = fusion(%a, %b, %c) */
"""


def test_bundles_of_loops_count_as_often_as_they_run():
    inner, outer = 6, 2 + 3 + 4  # bundles of each body, those of delay included
    assert scheduled_cycles(ROWS) == 3 + 128 * (outer + 16 * inner) + 1


def test_a_loop_whose_end_a_value_decides_counts_once():
    assert scheduled_cycles(ROWS.replace("%s51, 16", "%s51, %s52")) == 3 + 128 * (9 + 6) + 1
    assert scheduled_cycles(ROWS.replace("$region382", "$region999")) == 3 + 128 * (9 + 6) + 1, "a branch forward"


KERNEL = """\
%{name} (t: f32[1000,64], i: s32[512]) -> f32[512,64] {{
  %t{n} = f32[1000,64]{{1,0}} parameter(0)
  %i{n} = s32[512]{{0}} parameter(1)
  ROOT %g{n} = f32[512,64]{{1,0}} gather(%t{n}, %i{n}), offset_dims={{1}}, slice_sizes={{1,{width}}}
}}
"""
PROGRAM = f"""\
HloModule step, is_scheduled=true

{KERNEL.format(name="one", n=1, width=64)}
{KERNEL.format(name="two", n=2, width=64)}
{KERNEL.format(name="other", n=3, width=32)}
ENTRY %main (x: f32[1000,64], y: s32[512]) -> f32[512,64] {{
  %x = f32[1000,64]{{1,0}} parameter(0)
  %y = s32[512]{{0}} parameter(1)
  %z = s32[512]{{0}} add(%y, %y), backend_config={{"window_config":{{"estimated_cycles":"800"}}}}
  %gather_fusion = f32[512,64]{{1,0}} fusion(%x, %z), kind=kCustom, calls=%one, metadata={{op_name="first"}}
  %gather_fusion.1 = f32[512,64]{{1,0}} fusion(%x, %y), kind=kCustom, calls=%two, metadata={{op_name="second"}}
  ROOT %gather_fusion.2 = f32[512,64]{{1,0}} fusion(%x, %y), kind=kCustom, calls=%other
}}
"""


def test_equal_kernels_have_one_schedule():
    module = parse(PROGRAM)
    assert schedules(module) == {}, "nothing is written"
    with written():
        folder = Path(os.environ["LIBTPU_INIT_ARGS"].rpartition("=")[2])
        old = folder / "1795440000-gather_fusion.2-71-final_bundles.txt"
        old.write_text(ROWS)
        empty()
        for name in ("gather_fusion", "z"):
            (folder / f"1795440772-{name}-71-final_bundles.txt").write_text(ROWS)
        found = schedules(module)
    assert not folder.exists()
    assert found == dict.fromkeys(("%gather_fusion", "%gather_fusion.1"), scheduled_cycles(ROWS)), "z has an estimate"
    assert estimated_cycles(module) == Cycles(800, counted=1, missing=3)
    assert estimated_cycles(with_schedules(module, found)) == Cycles(800 + 2 * scheduled_cycles(ROWS), 3, missing=1)


@pytest.mark.extra("tpu-aot")
def test_libtpu_writes_the_schedules_of_what_has_no_estimate():
    """In another process: libtpu reads its flags when it is loaded."""
    program = """
import jax
from jax.sharding import SingleDeviceSharding
from unity_jax.aot.topologies import topology
from unity_jax.aot.bundles import schedules, written
from unity_jax.aot.hlo import parse
with written():
    on = SingleDeviceSharding(topology("v5e:2x4")[0])
    table = jax.ShapeDtypeStruct((250_000, 128), "float32", sharding=on)
    rows = jax.ShapeDtypeStruct((4096,), "int32", sharding=on)
    module = parse(jax.jit(lambda t, i: t[i]).lower(table, rows).compile().as_text())
    (cycles,) = schedules(module).values()
    assert 4 < cycles / 4096 < 8, cycles
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
