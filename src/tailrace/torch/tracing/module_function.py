"""A PyTorch module as a pure function of JAX arrays.

    module.forward(*args)  ──▶  function(params, buffers, arrays, key) ──▶ outputs, losses, buffers

Its operations become JAX's through torchax. Each module that is called opens a scope with its path,
so tensors inside are found by name; random operations draw from the key that is given, so that they
are new in every step and the same in every repetition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch
from torch.nn.modules import transformer

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.torch.calls.containers import flatten, held_elsewhere, rebuild
from tailrace.torch.torchax.env import Env
from tailrace.torch.torchax.loading import environment
from tailrace.torch.torchax.ops.table import REPLACED
from tailrace.torch.torchax.unnamed_device import unnamed_device
from tailrace.torch.tracing.attributes import attributes_put_back
from tailrace.torch.tracing.autocast import cast_arguments
from tailrace.torch.tracing.backward_hooks import refusals
from tailrace.torch.tracing.blocks import Staging
from tailrace.torch.tracing.cumulative_norms import cumulative_norms
from tailrace.torch.tracing.custom_functions import custom_functions
from tailrace.torch.tracing.explained_errors import explained
from tailrace.torch.tracing.losses import LOSS_FUNCTIONS
from tailrace.torch.tracing.watch import Watch, WatchingMode, is_traced, module_scopes, watched


@dataclasses.dataclass
class Ran:
    """What one forward pass yields, as JAX values.

    Attributes:
        outputs: what forward returned; tensors are JAX values, the rest is as it was.
        leaves: the tensors in it: (path, value).
        losses: what loss functions returned, in order.
        buffers: the buffers afterwards.
        changed: those that have another value than before.
        written: arguments that were changed in place, by their number.
    """

    outputs: Any
    leaves: list[tuple[str, Any]]
    losses: list[Any]
    buffers: dict[str, Any]
    changed: frozenset[str]
    written: dict[int, Any]
    watch: Watch


@dataclasses.dataclass(eq=False)
class ModuleFunction:
    """A module's forward pass as a function.

    Args:
        module: the module.
        training: for each module inside, whether it is in training mode.
        precision: the precision of matrix products, as for `jax.default_matmul_precision`; None: JAX's.
        staging: which stage a block belongs to.
        differentiated: whether gradients of it may be asked for.
    """

    module: torch.nn.Module
    training: Mapping[str, bool]
    precision: str | None = None
    staging: Staging = dataclasses.field(default_factory=Staging)
    differentiated: bool = True

    def __call__(
        self,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        fill: Callable[[Callable[[Any], Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        key: object,
    ) -> Ran:
        """Run forward.

        Args:
            params: the parameters, JAX values by name.
            buffers: the buffers, likewise.
            fill: `fill(wrap)` gives the arguments, with each array in them wrapped as a tensor.
            key: the key that random numbers are drawn from.
        """
        env = environment()
        watch = Watch(env, staging=self.staging)
        weights = {name: watch.tensor(value) for name, value in params.items()}
        states = {name: watch.tensor(value) for name, value in buffers.items()}
        tensors = {**weights, **states}
        _as_parameters(self.module, tensors)
        given: list[tuple[Any, Any]] = []

        def wrap(array: object) -> Any:
            # With the array that went in: another one in the tensor afterwards says that forward
            # wrote to it.
            given.append((watch.tensor(array), array))
            return given[-1][0]

        args, kwargs = fill(wrap)
        with self._traced(env, watch, tensors, key):
            try:
                # The module is not changed: its tensors are exchanged for those of the trace while it
                # runs.
                out = torch.func.functional_call(
                    self.module, _by_places(self.module, tensors), args, kwargs, tie_weights=False
                )
            except Exception as error:
                raise explained(error, watch, self.module) from error
        # An in-place operation gives a tensor another JAX value; the same object means that nothing was
        # written.
        written = {
            number: tensor.jax()
            for number, (tensor, array) in enumerate(given)
            if tensor.jax() is not array
        }
        _check_unchanged(weights, params)
        # What was re-bound in forward is gone by now; what was updated in place is here.
        after, changed = _buffers_after(states, buffers)
        if lost := held_elsewhere(out, is_traced):
            attribute, kind = lost
            raise ProgramError(
                f"A model returns tensors, alone or in tuples, lists, dicts, named tuples and "
                f"dataclasses. {type(self.module).__name__} returns a {kind.__name__}, which holds "
                f"tensors in {attribute!r}. Return the tensors themselves, or say how a "
                f"{kind.__name__} is taken apart: tt.register_container({kind.__name__}, parser)."
            )
        outputs = rebuild(out, lambda v: watch.constant(v).jax() if watch.counts(v) else v)
        leaves = [(path or "0", v) for path, v in flatten(outputs) if isinstance(v, jax.Array)]
        return Ran(outputs, leaves, watch.losses, after, changed, written, watch)

    @contextlib.contextmanager
    def _traced(
        self, env: Env, watch: Watch, tensors: Mapping[str, Any], key: object
    ) -> Iterator[None]:
        """A context in which functions of PyTorch become operations of the program."""
        # The order counts. Of modes, the one entered last sees a function first: `WatchingMode`, then
        # torchax's environment. PyTorch's own settings come before both.
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            # PyTorch's code mixes dtypes freely, also where the caller has made JAX strict.
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            if self.precision is not None:
                stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(without_looking_at_values())
            stack.enter_context(_as_if_compiled())
            # The modes of when the model was made or `train()` was called: the module's own may differ
            # by now.
            stack.enter_context(in_modes(self.module, self.training))
            stack.enter_context(cumulative_norms(self.module))
            # torchax's own key would be a constant of the trace: every step would draw the same
            # dropout mask.
            stack.enter_context(env.override_property(prng=key))
            stack.enter_context(watched(watch))
            stack.enter_context(module_scopes(self.module, watch))
            used = watch.constants
            stack.enter_context(
                attributes_put_back(self.module, is_traced, lambda leaf: id(leaf) in used)
            )
            stack.callback(self.module.register_forward_hook(_refuses_rebinding(tensors)).remove)
            # PyTorch's code asks whether gradients are on; the caller may have called the model
            # under `no_grad`.
            stack.enter_context(torch.enable_grad())
            stack.enter_context(env)
            # Tensors that forward makes without a device (`torch.zeros(3)`) are tensors of the program.
            stack.enter_context(unnamed_device())
            # Hooks of the backward pass are refused in training; in inference they never run.
            replaced = {**REPLACED, **refusals(self.differentiated)}
            mode = functools.partial(WatchingMode, watch, LOSS_FUNCTIONS, replaced, cast_arguments)
            stack.enter_context(custom_functions(watch, self.differentiated, mode))
            stack.enter_context(mode())
            yield


def _check_unchanged(weights: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Refuse a forward pass that has written to a parameter."""
    for name, tensor in weights.items():
        if tensor.jax() is not params[name]:
            raise ProgramError(
                f"Parameter {name} is changed in place within the model. The optimizer updates the "
                f"parameter as it was before, so the change would be lost after the call. Compute "
                f"with the changed value instead ({name}.clamp(...)), or make it a buffer."
            )


def _buffers_after(
    states: Mapping[str, Any], buffers: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[str]]:
    """The values of buffers after forward, and the names of those that it has changed."""
    after = {name: state.jax() for name, state in states.items()}
    for name, value in after.items():
        if value.shape != buffers[name].shape:
            raise ProgramError(
                f"A buffer keeps its shape from step to step. {name!r} was "
                f"{list(buffers[name].shape)} and is {list(value.shape)} after forward."
            )
    # By identity: an in-place operation makes another value. Inference writes only these back to the
    # host.
    changed = frozenset(name for name, value in after.items() if value is not buffers[name])
    # The state of a loop keeps its dtypes.
    return {name: v.astype(buffers[name].dtype) for name, v in after.items()}, changed


def _as_parameters(module: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    """Let those of a module's tensors that are parameters say so, and whether they are trained."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (tensor := tensors.get(name)) is not None:
            tensor._is_param = True  # what PyTorch's isinstance looks at
            tensor.requires_grad = parameter.requires_grad


def _by_places(module: torch.nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors for each place that holds one, by its path.

    A tensor in several places has one name among `tensors`. A module in several places has one path
    here: `functional_call` would put its tensors in twice, and the second time remember the first as
    what it has to put back.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    given = {id(tensor): tensors[name] for name, tensor in named if name in tensors}
    return {
        f"{path}.{name}".lstrip("."): given[id(tensor)]
        for path, inner in module.named_modules()
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None and id(tensor) in given
    }


def _refuses_rebinding(given: Mapping[str, Any]) -> Callable[..., None]:
    """A hook that refuses a forward pass which gave a name another tensor, which would be lost."""

    def check(module: torch.nn.Module, _args: Tree, _out: Tree) -> None:
        kinds = {
            "Parameter": dict(module.named_parameters(remove_duplicate=False)),
            "Buffer": dict(module.named_buffers(remove_duplicate=False)),
        }
        found = {name: (kind, t) for kind, named in kinds.items() for name, t in named.items()}
        for name, tensor in given.items():
            kind, now = found.get(name, ("Buffer or parameter", None))
            if now is not tensor:
                what = "removed" if now is None else "reassigned"
                raise ProgramError(
                    f"{kind} {name} is {what} within the model. The new tensor would be lost after "
                    f"the call. Update it in place: use {name}.copy_(...) or {name}.add_(...)."
                )

    return check


def training_modes(module: torch.nn.Module) -> dict[str, bool]:
    """Which of the modules inside are in training mode now."""
    return {name: inner.training for name, inner in module.named_modules()}


@contextlib.contextmanager
def in_modes(module: torch.nn.Module, wanted: Mapping[str, bool]) -> Iterator[None]:
    """The modules in the given modes, for as long as this lasts."""
    inside = dict(module.named_modules())
    before = {name: inner.training for name, inner in inside.items()}
    try:
        for name, flag in wanted.items():
            inside[name].training = flag
        yield
    finally:
        for name, flag in before.items():
            inside[name].training = flag


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without JAX's warnings about 64-bit dtypes, which PyTorch's code asks for all the time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explicitly requested dtype")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


@contextlib.contextmanager
def without_looking_at_values() -> Iterator[None]:
    """Without those parts of PyTorch that look at values to choose or to check.

    Fused attention is one opaque operation; transformers compare a mask with the causal one, to say
    so to attention, which gets the mask anyway; distributions check their parameters.
    """
    # Switches and attributes of the whole process, put back at the end: PyTorch has none for one call.
    distribution: Any = torch.distributions.Distribution
    fast, checked = torch.backends.mha.get_fastpath_enabled(), distribution._validate_args
    detect = transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    distribution.set_default_validate_args(False)
    transformer._detect_is_causal_mask = _said_to_be_causal
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        distribution.set_default_validate_args(checked)
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def _as_if_compiled() -> Iterator[None]:
    """What libraries do where they are compiled: `transformers` chooses by values elsewhere."""
    # PyTorch's compiler keeps the function below when it is imported, which tracing does: it must find
    # PyTorch's own, or nothing could be compiled in this process any more.
    importlib.import_module("torch._dynamo")
    hook: Any = torch.utils.hooks.BackwardHook
    compiling = torch.compiler.is_compiling
    set_up = hook.setup_input_hook, hook.setup_output_hook
    # Hooks of the backward pass look for nodes of PyTorch's graph; training refuses them by name.
    hook.setup_input_hook = hook.setup_output_hook = _as_given
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = compiling
        hook.setup_input_hook, hook.setup_output_hook = set_up


def _as_given(_: object, values: Tree) -> Any:
    return values


def _said_to_be_causal(
    mask: TensorLike, is_causal: bool | None = None, size: int | None = None
) -> bool:
    return is_causal is True
