"""`poptorch.optim`: the optimizers of the native front end, with what else the original has."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer as Optimizer

from tailrace.base.trees import Tree
from tailrace.compat.originals.missing import missing_from
from tailrace.errors import OptionError
from tailrace.torch import optim as native
from tailrace.torch.errors import UsageError


class VariableAttributes:
    """Which numbers of an optimizer may change after compiling. All may here; the marks are only kept.

    Args:
        names: the numbers there are.
        variable: those marked as variable.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = poptorch.optim.SGD(layer.parameters(), lr=0.1)
    >>> optimizer.variable_attrs.isConstant("lr"), optimizer.variable_attrs.isConstant("momentum")
    (False, True)
    """

    def __init__(self, names: set[str], variable: set[str]) -> None:
        self._names, self._variable = names, variable

    def isConstant(self, attr: str) -> bool:
        """Whether a number is marked as constant.

        Args:
            attr: its name.

        Raises:
            UsageError: there is no such number.
        """
        self._check(attr)
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Mark a number as constant.

        Args:
            attr: its name.

        Raises:
            UsageError: there is no such number.
        """
        self._check(attr)
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Mark a number as variable.

        Args:
            attr: its name.

        Raises:
            UsageError: there is no such number.
        """
        self._check(attr)
        self._variable.add(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._names:
            raise UsageError(f"Unknown attribute {attr!r}: there are {sorted(self._names)}")


_EXAMPLE = """>>> import torch
    >>> from tailrace.compat import poptorch
    >>> optimizer = poptorch.optim.{name}(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> optimizer.loss_scaling
    1.0
    """
"""Of a class that `_with_attributes` makes; that of the native class has its own imports."""


def _with_attributes(kind: type) -> type:
    """A class of the native front end, with the original's marks and refusals."""
    parameters = inspect.signature(kind.__init__).parameters
    names = [
        n for n, p in parameters.items() if n not in ("self", "params") and p.kind != p.VAR_KEYWORD
    ]

    # The moments of 16-bit parameters are in 32 bits unless said otherwise: squares of gradients
    # do not fit into 16, and NaN follows within a few steps.
    wide = {
        n: torch.float32
        for n in names
        if n.endswith(("momentum_accum_type", "velocity_accum_type"))
    }

    def __init__(self: Any, params: Tree, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("amsgrad"):
            raise OptionError("Only non-amsgrad Adam/AdamW optimizers are supported.")
        # None means "not given" in the original, also for arguments whose default is something
        # else.
        given = {n: v for n, v in kwargs.items() if v is not None}
        kind.__init__(self, params, *args, **{**wide, **given})
        # The original's rule: what is passed may change later, defaults are constant.
        self.variable_attrs = VariableAttributes(
            set(names), {*names[: len(args)], *given} & set(names)
        )

    text = (kind.__doc__ or "").split(">>>")[0] + _EXAMPLE.format(name=kind.__name__)
    return type(kind.__name__, (kind,), {"__init__": __init__, "__doc__": text})


SGD = _with_attributes(native.SGD)
Adam = _with_attributes(native.Adam)
AdamW = _with_attributes(native.AdamW)
RMSprop = _with_attributes(native.RMSprop)
LAMB = _with_attributes(native.LAMB)


__getattr__, __dir__ = missing_from(__name__)
