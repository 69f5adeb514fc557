"""PyTorch's operator samples as ATen graphs, evaluated by the lowerings."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode

from tailrace.torch.calls.arrays import array_of, tensor_of
from tailrace.torch.calls.containers import flatten, rebuild
from tailrace.torch.lowerings.composites import decompositions
from tailrace.torch.lowerings.evaluate import evaluate

COMPILER = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Without the compiler's optimizations, which would take most of the time."""


def is_tensor(value):
    return isinstance(value, torch.Tensor)


class Called(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def captured(function, tensors):
    """The functional graph of ATen operations of a function of tensors, as AOTAutograd makes it."""
    found = []

    def keep(gm, example_inputs):
        found.append(gm)
        return gm.forward

    whole: Any = Called(function)
    # Tensors that the function has besides its arguments are constants.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        aot_module_simplified(
            whole,
            [mode.from_tensor(t) for t in tensors],
            fw_compiler=keep,
            decompositions=decompositions(),
            keep_inference_input_mutations=False,
        )
    return found[0]


def evaluated(function, sample, reached):
    """(outputs, gradients) of a sample, by the lowerings; the gradients are those of a weighed sum."""
    which, differentiated = reached
    given = (sample.input, sample.args, sample.kwargs)
    leaves = [t for _, t in flatten(given) if is_tensor(t)]
    tensors = [t.detach().resolve_conj().resolve_neg().clone() for t in leaves]
    moved = [n for n, t in enumerate(leaves) if t.requires_grad and differentiated]

    def flat(*tensors):
        values = iter(tensors)
        one, args, kwargs = rebuild(given, lambda v: next(values) if is_tensor(v) else v)
        out = sample.output_process_fn_grad(function(one, *args, **kwargs))
        return tuple(t for _, t in flatten(out) if is_tensor(t))

    graph = captured(flat, tensors)
    arrays = [jnp.asarray(array_of(t)) for t in tensors]

    def total(some, arrays):
        arrays = list(arrays)
        for number, value in zip(moved, some, strict=True):
            arrays[number] = value
        # Inputs that the function has written are returned before what it returns.
        # Before both are the tokens of what has an effect.
        tokens = [None] * (len(graph.graph.find_nodes(op="placeholder")) - len(arrays))
        found = evaluate(graph, tokens + arrays, jax.random.key(0))[-len(which) :]
        size = 0.0
        with jax.numpy_dtype_promotion("standard"):
            for leaf, one in zip(found, which, strict=True):
                if one:
                    is_complex = jnp.iscomplexobj(leaf)
                    parts = jnp.stack([leaf.real, leaf.imag], -1) if is_complex else leaf
                    weights = np.cos(np.arange(parts.size)).astype(np.float32)
                    size += (parts.astype(jnp.float32).ravel() * weights).sum()
        return size, found

    def alone(some, arrays):
        return [], total(some, arrays)[1]

    program = jax.grad(total, has_aux=True) if any(which) else alone
    some = [arrays[number] for number in moved]
    lowered = jax.jit(program).lower(some, arrays)
    slopes, found = lowered.compile(compiler_options=COMPILER)(some, arrays)
    # JAX's gradient of a complex number is the conjugate of PyTorch's.
    slopes = [slope.conj() if jnp.iscomplexobj(slope) else slope for slope in slopes]
    return [tensor_of(value) for value in found], [tensor_of(value) for value in slopes]
