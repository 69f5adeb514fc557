"""Every exception that Tailrace raises.

    TailraceError
    ├── DeviceError            the requested devices do not exist
    │   └── DeviceMemoryError  a device does not have enough memory for an execution
    ├── DataError              a dataset or one of its elements breaks a rule
    │   ├── ElementError       an element differs from the first one (leaf path, shape, dtype)
    │   ├── DataExhausted      fewer elements than requested
    │   ├── ProducerError      the dataset itself raised; its exception is the cause
    │   └── DataTimeout        the dataset gave no element within `timeout_s`
    ├── DistributedError       processes that are missing, or run different programs
    ├── FeedError              an infeed or outfeed used in a way it does not allow
    │   └── WaitStopped        a wait for data was stopped, as by `trainer.stop()`
    ├── ProgramError           a program or a loop cannot be built or run
    │   ├── ReplicaError       replicas that do not fit, or values that would drift apart
    │   └── PipelineError      a model cannot be run as the requested pipeline
    ├── OptionError            an option has an invalid value
    ├── SelectionError         no tensor has the requested name
    ├── PlanError              a pipeline schedule breaks a rule
    ├── RunError               a run directory cannot be written or read
    ├── CheckpointError        a checkpoint cannot be written or read, or does not fit
    ├── NonFiniteError         a NaN or Inf where `stop_on_nonfinite` watches
    ├── CorruptionError        the same computation gave other bits, where `sentinel=` watches
    ├── VersionError           a package has a version that Tailrace does not support
    └── MissingDependency      an optional package is not installed

Some also derive from the built-in class that a caller would expect (`ValueError`, `TypeError`), so that
code that does not know Tailrace can catch them.
"""


class TailraceError(Exception):
    """The root of all errors raised by Tailrace."""


class DeviceError(TailraceError, RuntimeError):
    """The requested devices do not exist, or can no longer be chosen."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device does not have enough memory for an execution; the message lists uses and remedies."""


class DataError(TailraceError, ValueError):
    """A dataset, or one of its elements, breaks a rule."""


class ElementError(DataError):
    """An element differs from the first one; the message names the leaf."""


class DataExhausted(DataError):
    """More elements were requested than the dataset has."""


class ProducerError(DataError):
    """The dataset raised while it was read; that exception is `__cause__`."""


class DataTimeout(DataError, TimeoutError):
    """The dataset gave no element within `timeout_s`; the message names the element."""


class FeedError(TailraceError, RuntimeError):
    """An infeed or outfeed is used in a way that it does not allow."""


class WaitStopped(FeedError):
    """A wait for data was stopped; nothing is lost, and reading can continue."""


class DistributedError(TailraceError, RuntimeError):
    """Processes are missing, or one of them runs another program; the message names it."""


class ProgramError(TailraceError, ValueError):
    """A program, loop or step function cannot be built or run as it is written."""


class ReplicaError(ProgramError):
    """The replicas do not fit the devices, or values would drift apart between them."""


class PipelineError(ProgramError):
    """A model cannot be run as the requested pipeline."""


class OptionError(TailraceError, ValueError):
    """An option has an invalid value."""


class SelectionError(TailraceError, KeyError):
    """A selection matches no tensor, or no metric has a name; the message lists the nearest names."""

    __str__ = Exception.__str__  # a KeyError would show the sentence in quotes


class PlanError(TailraceError, ValueError):
    """A pipeline schedule cannot be made, or a plan breaks one of its rules."""


class RunError(TailraceError, OSError):
    """A run directory cannot be written or read; the message says what is still readable."""


class CheckpointError(TailraceError, OSError):
    """A checkpoint cannot be written or read, or belongs to another training; the message says why."""


class NonFiniteError(TailraceError, ArithmeticError):
    """A watched tensor became NaN or infinite; the message says where and when.

    Attributes:
        step: the index of the first bad step.
        culprit: the origin of the first bad value, with operation, scope, source and row; or None.
        elements: the elements of the bad step, stacked leaf by leaf; or None.
    """

    step: int = -1
    culprit: object = None
    elements: object = None


class CorruptionError(TailraceError, RuntimeError):
    """The same computation gave other bits: memory or a processor is faulty.

    Attributes:
        step: the index of the step.
        names: the tensors, or groups of tensors, that differ.
    """

    step: int = -1
    names: tuple[str, ...] = ()


class VersionError(TailraceError, RuntimeError):
    """A package changed something that Tailrace relies on; the message says which versions fit."""


class MissingDependency(TailraceError, ImportError):
    """An optional package is needed and not installed; the message says how to install it."""

    @classmethod
    def for_feature(cls, feature: str, package: str, extra: str) -> "MissingDependency":
        """The error for a missing package."""
        return cls(
            f"{feature} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'tailrace[{extra}]'."
        )
