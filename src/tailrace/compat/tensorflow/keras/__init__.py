"""`tensorflow.keras`: Keras 3 with what programs of the originals expect of it.

Names are Keras' own, in Keras' own modules. Beside them: `keras.ipu`, modules that older versions had,
and arguments that Keras 3 has dropped, where their meaning is plain (`older.py`).

In: names of `tensorflow.keras`. Out: Keras 3's own objects.
Rule: Keras' classes are not replaced; arguments are translated before Keras sees them.
"""

from __future__ import annotations

import difflib
import sys
from typing import Any

import keras as _keras

import tailrace.keras as _tk  # noqa: F401  (selects the backend before Keras is imported)
from tailrace.compat.originals.missing import UnknownName
from tailrace.compat.tensorflow.keras import older as _older

__version__ = _keras.__version__
__path__ = __path__  # modules of Keras are found as modules of this one

_older.accept()


def __getattr__(name: str) -> Any:
    if name == "ipu":
        from tailrace.compat.ipu import keras

        return keras
    if name in _older.MODULES:
        return _older.MODULES[name]
    try:
        return getattr(_keras, name)
    except AttributeError:
        if name.startswith("__"):
            raise
        near = difflib.get_close_matches(name, [*dir(_keras), *_older.MODULES], n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise UnknownName(f"module 'keras' has no attribute {name!r}.{hint}") from None


def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[__name__]), *dir(_keras), *_older.MODULES, "ipu"})
