"""How a module becomes a program: traced, or captured where tracing refuses it.

The choice is made here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, ProgramError
from tailrace.torch.calls.inputs import CallForm
from tailrace.torch.errors import CallError, UsageError
from tailrace.torch.models.weights import of_original_classes
from tailrace.torch.tracing.forward import Forward
from tailrace.torch.tracing.losses import LossError
from tailrace.torch.tracing.module_function import ModuleFunction

LossChoice = str | int | Callable[[Any], Any] | None
"""Which value that a module returns is trained: a name, an index, a function of the output."""

_WAYS = ("traced", "captured")
"""In the order in which they are tried."""


def check_choice(loss: object) -> None:
    """Refuse what cannot say which value is the loss."""
    named = isinstance(loss, str | int) and not isinstance(loss, bool)
    if loss is not None and not named and not callable(loss):
        raise OptionError(
            f"loss= says which of the values that the module returns is trained: a name, an index or a "
            f"function of the output. Received: loss={loss!r}."
        )


def learned(
    function: ModuleFunction,
    form: CallForm,
    params: Tree,
    buffers: Tree,
    training: bool,
    loss: LossChoice,
    captures: bool,
) -> Forward:
    """The forward pass of a module, by the first way that takes it.

    Args:
        function: the module.
        form: how it is called.
        params: its parameters, by name.
        buffers: its buffers.
        training: whether it is trained.
        loss: which value that it returns is trained, where the user says so.
        captures: whether it may be captured.

    Raises:
        ProgramError: no way takes it.
    """
    # A trace knows losses of torch.nn, and not which value is returned.
    ways = ["captured"] if loss is not None else [w for w in _WAYS if captures or w == "traced"]
    refusals: list[ProgramError] = []
    for way in ways:
        try:
            if way == "traced":
                forward = Forward(function, form)
                forward.learn(params, buffers, training)
                return forward
            forward = _captured(function, form, loss)
            with of_original_classes(function.module):
                forward.learn(params, buffers, training)
            return forward
        except (UsageError, CallError):
            raise  # whichever way the module goes
        except ProgramError as error:
            refusals.append(error)
        except Exception as error:
            if not refusals:
                raise
            # Whatever fails in the second place, the first refusal is the one to act on.
            refusals[0].add_note(f"Nor can it be {way}: {type(error).__name__}: {error}")
            raise refusals[0] from error
    first, last = refusals[0], refusals[-1]
    if last is first:
        raise first
    # What is returned, and how to say which value is meant, is what the user can do about a loss.
    if isinstance(first, LossError):
        raise last from first
    first.add_note(f"Nor can it be captured: {last}")
    raise first


def _captured(function: ModuleFunction, form: CallForm, loss: LossChoice) -> Forward:
    # Late: Dynamo takes a second to import, which most modules do not need.
    from tailrace.torch.capture.forward import CapturedForward

    return CapturedForward(function, form, choice=loss)
