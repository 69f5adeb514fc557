"""The cost of an instruction, from its text: FLOPs and bytes."""

from __future__ import annotations

import math
import re

from tailrace.profiling.programs.hlo_text import Instruction, Module, Shape

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "copy", "reshape"),
    *("broadcast", "transpose", "slice", "concatenate", "pad", "reverse", "gather", "convert"),
    *("dynamic-slice", "dynamic-update-slice", "while", "conditional", "call", "after-all"),
    *("copy-start", "copy-done", "optimization-barrier", "partition-id", "replica-id", "infeed"),
    *("all-reduce", "all-gather", "collective-permute", "reduce-scatter", "all-to-all", "domain"),
}
"""Instructions without arithmetic: they move values, or run others."""

_NOTHING_MOVED = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while"),
    *("conditional", "call", "partition-id", "replica-id", "optimization-barrier"),
}
"""Instructions that pass buffers on, or run others, which count themselves."""

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARY_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def flops(instruction: Instruction, module: Module) -> float:
    """The FLOPs of one run of an instruction; integer operations count too."""
    opcode, size = instruction.opcode, sum(shape.size for shape in instruction.shapes)
    if opcode == "fusion":
        return sum(flops(inner, module) for inner in module.inside(instruction))
    if opcode in _FREE:
        return 0.0
    operands = [module.instructions[n] for n in instruction.operands if n in module.instructions]
    shapes = [shape for operand in operands for shape in operand.shapes]
    if opcode == "dot" and shapes:
        found = _CONTRACTED.search(instruction.attributes)
        dims = [int(d) for d in found[1].split(",") if d] if found else []
        return 2.0 * size * math.prod(shapes[0].dims[d] for d in dims)
    if opcode == "convolution" and len(shapes) > 1:
        return 2.0 * size * _kernel(instruction, shapes[1].dims)
    if opcode == "custom-call":
        return _library_call(instruction, shapes)
    if opcode in ("reduce", "reduce-window") and shapes:
        return float(shapes[0].size)  # one addition per value that is read
    return float(size)  # elementwise: one per value, also where it takes more (exp, tanh)


def bytes_moved(instruction: Instruction, module: Module) -> float:
    """The bytes that one run of an instruction reads and writes, without caches."""
    if instruction.opcode in _NOTHING_MOVED:
        return 0.0
    inside = module.computations.get(instruction.calls[0], []) if instruction.calls else []
    read = 0.0
    for number, name in enumerate(instruction.operands):
        operand = module.instructions.get(name)
        if operand is not None:
            read += min(operand.nbytes, _used(inside, number, operand.nbytes))
    # A slice that is updated in place writes no more than the update, whatever its result's shape.
    written: float = instruction.nbytes
    root = next((one for one in inside if one.is_root), instruction)
    if root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
        update = module.instructions.get(root.operands[1])
        written = min(written, update.nbytes) if update is not None else written
    if instruction.opcode in ("dynamic-slice", "dynamic-update-slice"):
        read = min(read, float(written))  # the rest of its operand is not touched
    return read + written


def _used(inside: list[Instruction], number: int, whole: int) -> float:
    """The bytes of an operand that a fusion reads: only a part if it slices or updates it."""
    parameter = next((one for one in inside if one.number == number), None)
    if parameter is None:
        return whole
    users = [one for one in inside if parameter.name in one.operands]
    if users and all(one.opcode == "dynamic-slice" for one in users):
        return sum(one.nbytes for one in users)
    if users and all(
        one.opcode == "dynamic-update-slice" and one.operands[0] == parameter.name for one in users
    ):
        return 0.0  # it is written in place
    return whole


def _kernel(instruction: Instruction, kernel: tuple[int, ...]) -> float:
    """The number of products that each result of a convolution sums."""
    labels = _LABELS.search(instruction.attributes)
    window = _WINDOW.search(instruction.attributes)
    spatial = math.prod(int(n) for n in window[1].split("x")) if window else 1
    features = kernel[labels[2].index("i")] if labels else 1
    return float(spatial * features)


def _library_call(instruction: Instruction, shapes: list[Shape]) -> float:
    """The FLOPs of a product, a convolution or an attention that a library computes.

    Only the first result counts: others are the library's workspace.
    """
    if len(shapes) < 2:
        return 0.0
    target, result = _TARGET.search(instruction.attributes), instruction.shapes[0]
    name = target[1].lower() if target else ""
    left, right = shapes[0], shapes[1]
    if "conv" in name and "cudnn" in name:
        # The operands of the gradient of the kernel are the input and the output's gradient; of that
        # of the input, the output's gradient and the kernel.
        if "backwardfilter" in name:
            return _convolution(instruction, right, result)
        return _convolution(instruction, left if "backwardinput" in name else result, right)
    if "fmha" in name and len(right.dims) == 4:
        # Two products, of queries with keys and of weights with values; the backward pass has five.
        # Heads and positions come in either order; there are more positions, or it hardly matters.
        products = 4.0 * left.size * max(right.dims[1:3])
        return 2.5 * products if "backward" in name else products
    if not any(word in name for word in ("gemm", "matmul", "dot")):
        return 0.0
    found = _LIBRARY_CONTRACTED.search(instruction.attributes)
    if found:
        dims = [int(d) for d in re.findall(r"\d+", found[1])]
        return 2.0 * result.size * math.prod(left.dims[d] for d in dims)
    # Nothing says what is contracted. Without a batch it follows from the sizes: sqrt(mk kn / mn) = k.
    return 2.0 * result.size * math.sqrt(left.size * right.size / max(result.size, 1))


def _convolution(instruction: Instruction, outputs: Shape, kernel: Shape) -> float:
    """The FLOPs of a convolution or of one of its gradients: all three multiply the same pairs."""
    labels = _LABELS.search(instruction.attributes)
    features = kernel.dims[labels[2].index("o")] if labels else 1
    return 2.0 * outputs.size * kernel.size / max(features, 1)
