"""What is seen of a PyTorch module while its forward pass is traced: losses, paths, constants.

A mode in front of torchax's own sees every function that the module calls. It notes what loss
functions return, turns tensors that are not part of the module into constants of the program, and
keeps `torch.no_grad()` in force, which torchax alone would not.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.torch.calls.containers import flatten, rebuild
from tailrace.torch.torchax.env import Env
from tailrace.torch.torchax.refused_dtypes import refuse_mixed
from tailrace.torch.torchax.results import corrected, plainly, written
from tailrace.torch.torchax.view_aliases import Aliases

_watching: contextvars.ContextVar[Watch | None] = contextvars.ContextVar(
    "tailrace_torch_watch", default=None
)


def current_watch() -> Watch | None:
    """What watches the forward pass that is being traced; None outside of one."""
    return _watching.get()


@dataclasses.dataclass(eq=False)
class Watch:
    """One forward pass while it is traced.

    Attributes:
        env: torchax's environment.
        losses: what loss functions returned, as JAX values, in order.
        path: the modules that are being called, outermost first: (path, scope).
        staging: which stage a block belongs to.
        stages: (stage, device) of each stretch between blocks, in order.
        blocks: how many blocks began.
        latest: the tensor that was computed last.
        outside_of_blocks: whether a block has ended and none has begun since.
        aliases: which tensors are views of others.
        constants: tensors from outside of the module that were used, by id, as constants.
        made: tensors of the host that forward has made, by id.
        written: those of them that hold values of the program since, in their constants.
    """

    env: Env
    losses: list[Any] = dataclasses.field(default_factory=list)
    path: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    staging: Any = None
    stages: list[Any] = dataclasses.field(default_factory=list)
    blocks: int = 0
    latest: Any = None
    outside_of_blocks: bool = False
    aliases: Aliases = dataclasses.field(default_factory=Aliases)
    constants: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    made: dict[int, Any] = dataclasses.field(default_factory=dict)
    written: dict[int, Any] = dataclasses.field(default_factory=dict)

    def mark_loss(self, value: TensorLike) -> Any:
        """Note a tensor as a loss; returns it."""
        self.losses.append(value.jax())
        return value

    def tensor(self, array: object) -> torch.Tensor:
        """A JAX value as the tensor that PyTorch's code computes with."""
        return self.env.j2t_iso(array)

    def constant(self, value: object) -> Any:
        """A tensor that lives outside of the module, as a constant of the program."""
        # Containers are rebuilt leaf by leaf with this function: most leaves are numbers.
        if not isinstance(value, torch.Tensor) or is_traced(value):
            return value
        if id(value) not in self.constants:
            # Copied: the user may write to the tensor later, and a compiled program keeps its
            # constants.
            constant = self.tensor(self.env.t2j_copy(value.detach()))
            self.constants[id(value)] = (value, constant)  # keeps the tensor, and so its id
        return self.constants[id(value)][1]

    def counts(self, value: object) -> bool:
        """Whether a tensor has a value of the program."""
        return is_traced(value) or id(value) in self.written

    def note_made(self, out: Tree, given: list[Any]) -> None:
        """Remember tensors of the host that a function has returned."""
        # Only what forward has made may be written: writes to it end with the pass, as those to a
        # tensor of the program do.
        for _, leaf in flatten(out):
            if isinstance(leaf, torch.Tensor) and all(leaf is not one for one in given):
                self.made[id(leaf)] = leaf

    def note_writes(self, used: list[tuple[Any, Any, Any]]) -> None:
        """Find tensors of the host into which a function has written: (tensor, constant, value before).

        From now on the constant takes their place.
        """
        for tensor, constant, before in used:
            if constant._elem is before:
                continue
            with plainly():
                # PyTorch's own question, on the tensor of the host: a view would leave its base behind.
                alone = id(tensor) in self.made and not tensor._is_view()
            if not alone:
                raise ProgramError(
                    f"Forward writes values of the program into a tensor of the host, of shape "
                    f"{list(tensor.shape)}, where they would be lost. State that lasts from call to "
                    f"call belongs in a buffer: self.register_buffer(...). A tensor to be filled is "
                    f"made in forward: torch.zeros(..., device=x.device), or a clone()."
                )
            self.written[id(tensor)] = tensor

    @property
    def module(self) -> str:
        """The path of the innermost module that is being called."""
        return self.path[-1][0] if self.path else ""


class WatchingMode(TorchFunctionMode):
    """Sees each function of PyTorch that the module calls."""

    def __init__(
        self,
        watch: Watch,
        losses: frozenset[Any],
        replaced: dict[Any, Callable[..., Any]],
        cast: Callable[[Any, Any, Any], tuple[Any, Any]],
    ) -> None:
        super().__init__()
        self.watch, self.losses, self.replaced, self.cast = watch, losses, replaced, cast

    def __exit__(self, *given: Any) -> None:
        """Let what was written through views arrive, such as in buffers."""
        super().__exit__(*given)
        if given[0] is None:
            self.watch.aliases.settle()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Tree = (), kwargs: Tree = None
    ) -> Any:
        """Run a function, as PyTorch asks modes to."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.__deepcopy__ and not self.watch.counts(args[0]):
            # Its memo holds copies of other tensors, which are no arguments, and is to be filled.
            out = func(*args)
            self.watch.note_made(out, [])
            return out
        tensors = [leaf for _, leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Functions of the host's tensors alone run in PyTorch, once, while tracing.
        ours = any(self.watch.counts(t) for t in tensors)
        used: list[tuple[Any, Any, Any]] = []
        # Tensors of the host next to traced ones: torchax refuses to mix them.
        if ours and not all(is_traced(t) for t in tensors):
            constant = self.watch.constant
            args, kwargs = rebuild(args, constant), rebuild(kwargs, constant)
            pairs = [(t, constant(t)) for t in tensors if not is_traced(t)]
            used = [(t, one, one._elem) for t, one in pairs]
            tensors = [constant(t) for t in tensors]
        if ours:
            # Before the function reads its arguments: one of them may be a view whose base was
            # written.
            self.watch.aliases.settle()
            args, kwargs = self.cast(func, args, kwargs)
            refuse_mixed(func, args, kwargs)
        # Here as well as in the environment: replaced functions never reach that one.
        place = kwargs.pop("out", None) if ours else None
        out = self._run(func, args, kwargs) if ours else func(*args, **kwargs)
        if place is not None:
            out = written(place, out, self.watch.tensor)
        if ours:
            # Before the result is wrapped or stopped below: blocks cut at the value that the function
            # has made.
            self._note(out)
            self._flag(out, tensors)
            self.watch.note_writes(used)
        else:
            self.watch.note_made(out, tensors)
        if not torch.is_grad_enabled():
            # `torch.no_grad` has no meaning for JAX, which differentiates whatever was traced.
            out = self._stopped(out, tensors)
        if ours:
            self.watch.aliases.note(func, out, args, kwargs)
            self.watch.aliases.settle()
        # Last: the value that is noted must be the one that the module goes on with.
        if func in self.losses and is_traced(out):
            out = self.watch.mark_loss(out)
        return out

    def _run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Tree) -> Any:
        """Run a function, or what replaces it here."""
        if func in self.replaced:
            with jax.named_scope(func.__name__):
                out = self.replaced[func](self.watch, *args, **kwargs)
            if out is not NotImplemented:
                return corrected(func, args, kwargs, out, self.watch.tensor)
        return func(*args, **kwargs)

    def _flag(self, out: TensorLike, given: list[Any]) -> None:
        """Let results say whether they have a gradient, as those of PyTorch do."""
        # Code asks for it (`if x.requires_grad:`), and `copy.deepcopy` refuses by it; JAX does not need
        # it.
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            for _, leaf in flatten(out):
                if is_traced(leaf) and leaf.dtype.is_floating_point:
                    leaf.requires_grad = True

    def _note(self, out: TensorLike) -> None:
        """Remember the latest tensor, where blocks are cut; refuse one that belongs to no block."""
        made = next((leaf for _, leaf in flatten(out) if is_traced(leaf)), None)
        if made is None:
            return
        if self.watch.outside_of_blocks:
            raise ProgramError(
                "No active Block, all the ops must belong to a Block. Begin one before this, or put "
                "it into the one above."
            )
        self.watch.latest = made

    def _stopped(self, out: TensorLike, given: list[Any]) -> Any:
        def stop(value: TensorLike) -> Any:
            if not is_traced(value) or not value.dtype.is_floating_point:
                return value
            if any(value is one for one in given):  # an in-place operation returns what it changed
                if hasattr(value, "_elem"):
                    value._elem = jax.lax.stop_gradient(value._elem)
                return value
            return self.watch.tensor(jax.lax.stop_gradient(value.jax()))

        return rebuild(out, stop)


def is_traced(value: object) -> bool:
    """Whether a tensor represents a value of the program (torchax's classes have `jax()`)."""
    return isinstance(value, torch.Tensor) and hasattr(value, "jax")


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """Make `watch` the current one."""
    # A context variable: another thread may trace another module at the same time.
    token = _watching.set(watch)
    try:
        yield watch
    finally:
        _watching.reset(token)


@contextlib.contextmanager
def module_scopes(root: torch.nn.Module, watch: Watch) -> Iterator[None]:
    """While this lasts, calling a module inside `root` opens a scope with its path."""
    # By identity: a module in several places has one path, that of the first.
    paths = {id(module): path for path, module in root.named_modules() if path}

    def enter(module: torch.nn.Module, _args: Tree) -> None:
        path = paths.get(id(module))
        # The hooks are global: another thread may run modules of its own meanwhile.
        if path is not None and _watching.get() is watch:
            # Opened by hand, because entering and leaving are two hooks.
            scope = jax.named_scope(path)
            scope.__enter__()
            watch.path.append((path, scope))

    def leave(module: torch.nn.Module, _args: Tree, _out: Tree) -> None:
        if id(module) in paths and _watching.get() is watch:
            watch.path.pop()[1].__exit__(None, None, None)

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # An error left these scopes open; `watch.path` names the place.
        for _, scope in reversed(watch.path):
            scope.__exit__(None, None, None)
