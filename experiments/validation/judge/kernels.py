"""How long a kernel of a GPU takes: the roofline of an instruction that XLA:GPU runs as one kernel.

The largest of three times: its matmuls and convolutions at the rate of their type, its other arithmetic at the rate
of each instruction, and the bytes that it reads and writes at the memory's bandwidth, as large kernels reach them. Each
operand is read once, what is sliced or gathered from it in part; what is updated in place is written in part. Kernels
of attention are told by the names that they have in profiles, those of cuDNN by their target, and compute at rates of
their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from unity_jax.aot.hlo import Array, Instruction, Module

Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU: flops per second of matmuls by element type, bytes per second of its memory, simple instructions
    per second over all lanes, seconds to start a kernel; the part of the rate of matmuls that attention reaches."""

    matmul: Mapping[str, float]
    memory: float
    lanes: float
    start: float
    attention: float


# What kernels of one H200 were measured to reach (`experiments/results/calibration.csv`), which computes as the H100
# does: 685 TFLOP/s bf16, 669 f16, 370 TF32, 62 float64; 26 tera-instructions per second outside of matmuls; 2.4 us for
# a small kernel. Of its memory's bandwidth it reached 0.71; the H100 has 3.35 TB/s
# (https://www.nvidia.com/en-us/data-center/h100/). Attention by Triton, forward and backward together, with 32 heads of
# 2,048 positions and 128 features, reached 119 TFLOP/s.
H100 = Gpu({"bf16": 6.85e14, "f16": 6.69e14, "f32": 3.7e14, "f64": 6.2e13}, 0.71 * 3.35e12, 2.6e13, 2.4e-6, 119 / 685)

# How many results a multiprocessor computes per clock (128 for float32 addition), as what a result costs:
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions, compute capability 9.0.
_SPECIAL = (
    "divide exponential exponential-minus-one log log-plus-one logistic power rsqrt sqrt cbrt sine cosine tanh erf"
)
_HALF = "convert and or xor not shift-left shift-right-logical shift-right-arithmetic"
_COSTS = {**dict.fromkeys(_SPECIAL.split(), 128 / 16), **dict.fromkeys(_HALF.split(), 128 / 64)}
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast bitcast-convert reshape broadcast transpose copy slice "
    "dynamic-slice dynamic-update-slice concatenate pad gather iota partition-id replica-id after-all dot convolution "
    "custom-call fusion reverse scatter optimization-barrier".split()
)
NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all opt-barrier".split()
)
_PASSING = ("bitcast", "reshape", "copy", "convert", "transpose")


def kernel_seconds(op: Instruction, computation: Computation, module: Module, gpu: Gpu) -> float:
    """Seconds of an instruction of a scheduled computation."""
    if op.opcode in NO_KERNEL:
        return 0.0
    seconds = _attention(op, computation, gpu)
    if seconds is None:
        inside = list(_inside(op, computation, module))
        matmuls = sum(
            flops(i, c) / gpu.matmul.get(_operands(i, c)[0].element, 2 * gpu.lanes) for i, c in inside if _is_matmul(i)
        )
        seconds = max(matmuls, sum(_instructions(i, c) for i, c in inside) / gpu.lanes)
    return gpu.start + max(seconds, traffic(op, computation, module) / gpu.memory)


def _inside(op: Instruction, computation: Computation, module: Module) -> Iterator[tuple[Instruction, Computation]]:
    """What a kernel computes: the instruction, or those it fuses, with the computation that each stands in."""
    if op.opcode != "fusion":
        yield op, computation
        return
    for name in op.called:
        for inner in module.computations[name].values():
            yield from _inside(inner, module.computations[name], module)


def _operands(op: Instruction, computation: Computation) -> list[Array]:
    return [array for name in op.operands for array in computation[name].arrays]


# Kernels of attention

ATTENTION = re.compile(r'op_name="[^"]*/attention_(forward|backward_queries|backward_keys)(_causal)?/pallas_call"')
_PRODUCTS = {"forward": 2, "backward_queries": 3, "backward_keys": 4}
_BITS = 115  # operations on each score that dropout draws bits for: Threefry has twenty rounds of five


def _attention(op: Instruction, computation: Computation, gpu: Gpu) -> float | None:
    """Seconds of the arithmetic of attention; None of any other kernel."""
    if op.opcode != "custom-call":
        return None
    if match := ATTENTION.search(op.attributes):
        return attention_seconds(op, match, computation, gpu)
    match = CUDNN.search(op.attributes)
    return cudnn_seconds(op, bool(match[1]), computation) if match else None


def attention_seconds(op: Instruction, match: re.Match[str], computation: Computation, gpu: Gpu) -> float:
    """Seconds of the arithmetic of a kernel of attention: the products of all scores with as many features as values
    have, of half of them where a mask is causal; and of the bits of dropout, which the forward pass draws and keeps."""
    kind, causal = match.groups()
    arrays = [*_operands(op, computation), *op.arrays]
    batch, heads, _, queries = next(a.shape for a in arrays if a.element == "f32" and a.shape[2:3] == (2,))  # the sums
    value = _operands(op, computation)[-1]  # operands are in the order of their names
    scores = batch * heads * queries * value.shape[2] / (2 if causal else 1)
    drawn = _BITS * scores / gpu.lanes if kind == "forward" and len(op.arrays) == 3 else 0.0
    rate = gpu.attention * gpu.matmul.get(value.element, 2 * gpu.lanes)
    return 2 * _PRODUCTS[kind] * scores * value.shape[3] / rate + drawn


CUDNN = re.compile(r'"__cudnn\$fmhaSoftmax(Backward)?"')
_CAUSAL = re.compile(r'"mask_type": ?"CAUSAL"')
_LENGTHS = np.log2([512, 1024, 2048, 4096, 8192, 16384])
_TERAFLOPS = {
    (False, 64): (335, 373, 395, 408, 412, 413),
    (False, 128): (497, 574, 617, 609, 600, 595),
    (True, 64): (266, 348, 395, 417, 432, 433),
    (True, 128): (305, 408, 465, 499, 518, 516),
}
"""What cuDNN reaches on an H100 without a mask, of each pass (whether it is the backward one) and features of a head,
by how many positions there are: Shah et al., FlashAttention-3, https://arxiv.org/abs/2407.08608, figures 5 and 6."""
_WITH_CAUSAL_MASK = (0.63, 0.71, 0.78, 0.85, 0.88, 0.91)
"""The part of that which the forward pass reaches with a causal mask, 128 features; so all, for want of others."""


def cudnn_seconds(op: Instruction, backward: bool, computation: Computation) -> float:
    """Seconds of the arithmetic of attention by cuDNN: two products of the scores that are seen, or five."""
    query, key = _operands(op, computation)[:2]
    batch, heads, queries, features = query.shape
    scores, length = float(batch * heads * queries * key.shape[2]), math.log2(max(queries, 1))
    rate = 1e12 * np.interp(length, _LENGTHS, _TERAFLOPS[backward, 64 if features <= 64 else 128])
    if _CAUSAL.search(op.attributes):
        scores, rate = scores / 2, rate * np.interp(length, _LENGTHS, _WITH_CAUSAL_MASK)
    return float(2 * (5 if backward else 2) * scores * features / rate)


# Matmuls and convolutions


def _is_matmul(op: Instruction) -> bool:
    return op.opcode in ("dot", "convolution") or "__cublas" in op.attributes or "__cudnn$conv" in op.attributes


def flops(op: Instruction, computation: Computation) -> float:
    """Of a dot, a convolution, or a call of cuBLAS or cuDNN that stands for one."""
    lhs, rhs, result = *_operands(op, computation)[:2], op.arrays[0]
    if match := re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)', op.attributes):
        return 2.0 * math.prod(result.shape) * math.prod(lhs.shape[int(d)] for d in re.findall(r"\d+", match[1]))
    labels = re.search(r"dim_labels=\w+_(\w+)->", op.attributes)
    assert labels is not None, op
    if "convBackwardFilter" in op.attributes:
        outputs, kernel = rhs, result
    else:
        outputs, kernel = lhs if "convBackwardInput" in op.attributes else result, rhs
    # Each output takes one product with each weight of its channel.
    return 2.0 * math.prod(outputs.shape) * math.prod(kernel.shape) / kernel.shape[labels[1].index("o")]


def _instructions(op: Instruction, computation: Computation) -> float:
    """Of all lanes together, in float32 additions."""
    if op.opcode in _FREE or op.opcode.startswith("custom"):
        return 0.0
    arrays = _operands(op, computation)[:1] if op.opcode in ("reduce", "reduce-window", "sort") else op.arrays[:1]
    if not arrays:
        return 0.0
    element = arrays[0].element
    cost = _COSTS.get(op.opcode, 128 / 64 if element.startswith(("s", "u")) and op.opcode != "select" else 1)
    return cost * math.prod(arrays[0].shape)


# Bytes


def traffic(op: Instruction, computation: Computation, module: Module) -> float:
    """Bytes that a kernel reads and writes."""
    if op.opcode != "fusion":
        reads = sum(_read(op, i, computation[name], computation) for i, name in enumerate(op.operands))
        return reads + _written(op, computation)
    fused = module.computations[op.called[0]]
    reads = sum(_parameter_bytes(i, fused) for i in fused.values() if i.opcode == "parameter")
    root = next(i for i in fused.values() if i.root)
    roots = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return reads + sum(_written(_passed(r, fused), fused) for r in roots)


def _passed(op: Instruction, fused: Computation) -> Instruction:
    """The update in place that a root passes on, if it does."""
    first = op
    while op.opcode in _PASSING and op.operands:
        op = fused[op.operands[0]]
    return op if op.opcode in ("dynamic-update-slice", "scatter") else first


def _parameter_bytes(parameter: Instruction, fused: Computation) -> float:
    """What is read of an operand of a fusion: all of it, or no more than the parts that are taken from it."""
    total = 0.0
    for user in fused.values():
        for position, name in enumerate(user.operands):
            if name == parameter.name:
                if user.opcode in _PASSING[:2] and not user.root:
                    total += _parameter_bytes(user, fused)
                else:
                    total += _read(user, position, parameter, fused)
    return min(total, _bytes(parameter))


def _read(user: Instruction, position: int, operand: Instruction, computation: Computation) -> float:
    """Bytes of one operand that an instruction reads."""
    if user.opcode in ("slice", "dynamic-slice", "gather") and position == 0:
        return _bytes(user)
    if user.opcode == "dynamic-update-slice" and position == 0:
        return 0.0
    if user.opcode == "scatter" and position == 0:
        return _bytes(computation[user.operands[-1]])
    return _bytes(operand)


def _written(op: Instruction, computation: Computation) -> float:
    if op.opcode == "dynamic-update-slice":
        return _bytes(computation[op.operands[1]])
    if op.opcode == "scatter":
        return _bytes(computation[op.operands[-1]])
    arrays = op.arrays[:1] if op.opcode == "custom-call" else op.arrays  # the others are a library's workspace
    return sum(array.bytes for array in arrays)


def _bytes(op: Instruction) -> float:
    return sum(array.bytes for array in op.arrays)
