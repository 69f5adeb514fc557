"""The exceptions of the original, by their names; each is a `tr.TailraceError` as well.

What the original's Python checks raised derives from the built-in class they used; what its runtime
raised has the name it had in TensorFlow and derives from RuntimeError. The texts begin as they did
there, so that code which looks for them still finds them.
"""

from tailrace.errors import TailraceError


class IPUValueError(TailraceError, ValueError):
    """A value that may not be."""


class IPUTypeError(TailraceError, TypeError):
    """A value of a type that may not be."""


class IPURuntimeError(TailraceError, RuntimeError):
    """Something done at a time when it may not be done."""


class IPUNotImplementedError(TailraceError, NotImplementedError):
    """Something that was never possible there either."""


class FailedPreconditionError(TailraceError, RuntimeError):
    """A program that cannot be compiled or run as it is written."""


class InvalidArgumentError(TailraceError, RuntimeError):
    """Data that no program can be fed with."""


class NotFoundError(TailraceError, RuntimeError):
    """A feed that does not exist (any more)."""


class UnimplementedError(TailraceError, RuntimeError):
    """A combination of options that the compiler does not have."""


class OutOfRangeError(TailraceError, RuntimeError):
    """More elements were asked for than there are."""


class InternalError(TailraceError, RuntimeError):
    """Devices that cannot be divided as the program needs it."""
