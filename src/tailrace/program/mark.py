"""`tr.mark`: gives a value of a step a name, by which taps and guards find it."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnnecessaryIsInstance=false

from __future__ import annotations

import re
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.marks import Tag, path_name
from tailrace.jaxprs.marks import mark as marked

NAME = re.compile(r"[^\s*?\[\]:@#]+")
"""What a name may be: the other characters mean something in a selection, or in names of our own."""


def mark(value: Tree, name: str) -> Any:
    """Return `value`, which is then in the catalogue of its program as `name`.

    Taps, guards and `trainer.replay` find it by that name. Of a tree, each leaf is `name/<path>`. The
    second call that uses a name is `<name>#1`. What no tap selects costs nothing, and outside of a
    program of Tailrace a mark does nothing, so a step can also run in a loop of your own. In code that
    is differentiated use what it returns.

    Args:
        value: an array, or a tree of arrays.
        name: its name, such as "grad/generator". Slashes divide it; the first part is its kind.

    Raises:
        OptionError: the name is empty, or has one of the characters of a selection.
        ProgramError: the value is no tree of arrays.

    Example:
        >>> import jax, numpy as np, tailrace as tr
        >>> def step(w, x):
        ...     grad = tr.mark(jax.grad(lambda w: ((w * x) ** 2).mean())(w), "grad/w")
        ...     return w - 0.1 * grad, {"norm": abs(grad)}
        >>> tap = tr.Tap("grad/w", reduce="tensor")
        >>> trainer = tr.Trainer.from_step(step, np.float32(1), observe=[tap])
        >>> history = trainer.fit([np.ones(2, np.float32)] * 2, progress=False)
        >>> [round(float(g), 3) for g in trainer.records["grad/w"].values]
        [2.0, 1.6]
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or "" in name.split("/"):
        raise OptionError(
            f"tr.mark names a value by words with slashes between them, without spaces and without "
            f"* ? [ ] : @ #. Received: name={name!r}. For example 'grad/generator'."
        )
    check_arrays("tr.mark takes", value)
    leaves, structure = jax.tree_util.tree_flatten_with_path(value)
    named = [
        marked(leaf, Tag("value", "/".join(filter(None, (name, path_name(path)))), of_user=True))
        for path, leaf in leaves
    ]
    return jax.tree.unflatten(structure, named)
