"""Every flag of XLA that is set here, by what it is for.

    lowered.compile(compiler_options=OFFLINE["gpu"])               for one program
    os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES)   for all; before JAX is asked for its devices
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jaxlib

Flags = dict[str, str | bool]
"""Names and values."""

OFFLINE: dict[str, Flags] = {"gpu": {"xla_gpu_autotune_level": "0"}, "tpu": {}}
"""To compile for a platform that is not there: autotuning would run kernels."""

WITHOUT_TRITON: Flags = {"xla_disable_hlo_passes": "triton-gemm-rewriter,cublas-pad-for-gemms"}
"""For XLA:GPU to give all matmuls to cuBLAS. Untuned it gives some to Triton with tiles that do not fit.

All else is as on a GPU, where the autotuner decides between the two after these passes: what it gives to cuBLAS has
been split for Triton (`splitk-rewriter`) and is not padded to sides of multiples of eight, as matmuls are that Triton
cannot take
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/cublas_pad_for_gemms.cc,
https://github.com/openxla/xla/blob/main/xla/backends/gpu/autotuner/factory_cuda.cc, `GetCublasRewriterPipeline`).
"""

BARRIERS_KEPT: Flags = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""For XLA:CPU to leave optimization barriers in the text of what it compiled."""

SCHEDULES_WRITTEN: Flags = {
    "xla_jf_dump_llo_text": "true",
    "xla_jf_dump_llo_pass_label_regex": "^final_bundles",
    "xla_jf_dump_to": "",  # a folder follows
}
"""For libtpu to write the schedule of every kernel, in bundles."""

EIGHT_DEVICES: Flags = {"xla_force_host_platform_device_count": "8"}
"""One host poses as eight devices."""

RUN_ONCE: Flags = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}
"""Compiling takes most of the time of programs that run once or a few times: their machine code need not be fast."""

FEW_CORES: Flags = {"xla_cpu_parallel_codegen_split_count": "1"}
"""For XLA:CPU where as many processes as cores compile already."""

OLDER_EMITTERS: Flags = {"xla_cpu_use_fusion_emitters": "false"} if jaxlib.__version__.startswith("0.10.") else {}
"""For XLA:CPU of jaxlib 0.10 to take its older code generator, which is three times as fast."""


def as_text(flags: Mapping[str, str | bool]) -> str:
    """Flags as environment variables have them."""
    return " ".join(f"--{name}={value}" for name, value in flags.items())


def appended(variable: str, flags: Mapping[str, str | bool]) -> str:
    """What an environment variable says, and these flags."""
    return f"{os.environ.get(variable, '')} {as_text(flags)}".strip()
