"""Arguments of classes of the user's own: how they are taken apart and put together again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.torch.calls.containers import CustomContainer, register_container


class ICustomArgParser:
    """The interface of a parser: a subclass says how arguments of a class of yours are taken apart.

    >>> import torch
    >>> from tailrace.compat import poptorch
    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> class PairParser(poptorch.ICustomArgParser):
    ...     def yieldTensors(self, struct):
    ...         yield struct.a
    ...         yield struct.b
    ...     def reconstruct(self, original_structure, tensor_iterator):
    ...         return Pair(next(tensor_iterator), next(tensor_iterator))
    >>> [x.item() for x in PairParser().yieldTensors(Pair(torch.tensor(1), torch.tensor(2)))]
    [1, 2]
    """

    def yieldTensors(self, struct: Tree) -> Iterator[Any]:
        """The tensors in a struct, always in the same order.

        Args:
            struct: an object of the class.
        """
        raise NotImplementedError("A parser has a method yieldTensors(struct)")

    def reconstruct(self, original_structure: Tree, tensor_iterator: Iterator[Any]) -> Any:
        """A struct like the original with these tensors in it.

        Args:
            original_structure: an object of the class.
            tensor_iterator: yields the tensors, in the order of `yieldTensors`.
        """
        raise NotImplementedError("A parser has a method reconstruct(original, tensors)")


class _Renamed:
    """A parser of the original's, by the names of the native front end."""

    def __init__(self, parser: Any) -> None:
        self.reconstruct = parser.reconstruct
        # Both spellings: a parser written for the native front end may be registered here as well.
        self.yield_tensors = getattr(parser, "yieldTensors", None) or parser.yield_tensors


def registerCustomArgParser(
    arg_type: type, arg_parser: ICustomArgParser | CustomContainer | None
) -> None:
    """Say how objects of a class of your own are taken apart, as arguments and results of models.

    Args:
        arg_type: the class.
        arg_parser: an `ICustomArgParser`; None forgets it.

    Raises:
        OptionError: the parser lacks the methods of `ICustomArgParser`.

    >>> from tailrace.compat import poptorch
    >>> class Pair:
    ...     pass
    >>> class PairParser(poptorch.ICustomArgParser):
    ...     def yieldTensors(self, struct):
    ...         yield struct.a
    ...     def reconstruct(self, original_structure, tensor_iterator):
    ...         original_structure.a = next(tensor_iterator)
    ...         return original_structure
    >>> poptorch.registerCustomArgParser(Pair, PairParser())
    >>> poptorch.registerCustomArgParser(Pair, None)
    """
    if arg_parser is None:
        return register_container(arg_type, None)
    if not hasattr(arg_parser, "reconstruct") or not (
        hasattr(arg_parser, "yieldTensors") or hasattr(arg_parser, "yield_tensors")
    ):
        raise OptionError(
            f"A parser is an object derived from poptorch.ICustomArgParser, with the methods "
            f"yieldTensors(struct) and reconstruct(original, tensors). Received: {arg_parser!r}"
        )
    return register_container(arg_type, _Renamed(arg_parser))
