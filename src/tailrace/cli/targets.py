"""The user's objects that a command line names: MODULE:ATTRIBUTE."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from tailrace.errors import OptionError, TailraceError


def load(target: str, what: str = "a dataset", example: str = "mypackage.data:training_set") -> Any:
    """The object at MODULE:ATTRIBUTE, also searched in the working directory.

    >>> load("math:pi")
    3.141592653589793
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise OptionError(
            f"{what.capitalize()} is named as MODULE:ATTRIBUTE, for example {example}. "
            f"Received: {target!r}."
        )
    # `python script.py` finds modules in the script's directory; an installed command does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # First in the path, as with `python train.py`: the file's neighbours win over installed
    # modules.
    if module_name.endswith(".py"):  # a file, as it was started
        if not os.path.isfile(module_name):
            raise OptionError(f"{target!r} names the file {module_name!r}, which does not exist.")
        folder, module_name = os.path.split(os.path.abspath(module_name.removesuffix(".py")))
        sys.path.insert(0, folder)
    found = _guarded(
        lambda: importlib.import_module(module_name), f"importing {module_name!r} raised"
    )
    # A dotted attribute: a dataset may be a member of a class or of a namespace.
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise OptionError(
                f"{target!r} names no {what.split()[-1]}: {module_name!r} was imported, but it has no "
                f"attribute {attribute!r}."
            )
        found = getattr(found, name)
    return found


def call(function: Callable[[], Any], target: str) -> Any:
    """Call a function that `load` found; its exception becomes one sentence."""
    return _guarded(function, f"{target} was called and raised")


def _guarded(function: Callable[[], Any], what: str) -> Any:
    """Call the user's code; its exception becomes one sentence."""
    try:
        return function()
    # Its text already says what to change; a sentence in front would hide that.
    except TailraceError:
        raise
    except Exception as error:
        raise OptionError(f"{what} {type(error).__name__}: {error}") from error
