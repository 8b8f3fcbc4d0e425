"""What XLA:TPU allocates in a device's memory for a program.

Its `memory_analysis` does not say: `temp_size_in_bytes` has what is unused at the peak twice, `peak_memory_in_bytes`
what lies on the chip as well (libtpu of jax 0.10.2). The report does that it writes when it is asked to:

    Memory Space: default (color=0)
    Total bytes: 134220288 (128.00MiB)
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from unity_jax.aot.compiled import CompiledMemory

_REPORT = "*memory-usage-report.txt"
_TOTAL = re.compile(r"\(color=0\)\s+Total bytes: (\d+)")


def allocated(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], platform: str
) -> tuple[jax.stages.Compiled, int]:
    """Compile a program, and the bytes of a device's memory that it takes.

    **Arguments:** `options`: the compiler's; `platform`: of the devices that it is compiled for.
    """
    if platform != "tpu":
        made = lowered.compile(compiler_options=dict(options))
        return made, CompiledMemory.of(made).peak
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        made = lowered.compile(compiler_options={**options, **report})
        totals = [_TOTAL.search(path.read_text()) for path in Path(folder).glob(_REPORT)]
    return made, max(int(total[1]) for total in totals if total)
