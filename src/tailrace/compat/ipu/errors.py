"""The exceptions of the original, by their names; each is a `tr.TailraceError` as well.

What the original's Python checks raised derives from the built-in class they used; what its runtime
raised has the name it had in TensorFlow and derives from RuntimeError. The texts begin as they did
there, so that code which looks for them still finds them.
"""

from tailrace.errors import TailraceError


class IPUValueError(TailraceError, ValueError):
    """A value that is not allowed."""


class IPUTypeError(TailraceError, TypeError):
    """A value of the wrong type."""


class IPURuntimeError(TailraceError, RuntimeError):
    """A call at a time when it is not allowed."""


class IPUNotImplementedError(TailraceError, NotImplementedError):
    """Something that the original does not do either."""


class FailedPreconditionError(TailraceError, RuntimeError):
    """A program that cannot be compiled or run as it is written."""


class InvalidArgumentError(TailraceError, RuntimeError):
    """Data that no program can be fed with."""


class NotFoundError(TailraceError, RuntimeError):
    """A feed that does not exist, or no longer."""


class UnimplementedError(TailraceError, RuntimeError):
    """A combination of options that the compiler does not have."""


class OutOfRangeError(TailraceError, RuntimeError):
    """More elements were requested than there are."""


class InternalError(TailraceError, RuntimeError):
    """Devices that cannot be divided as the program requires."""
