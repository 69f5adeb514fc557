"""Every exception that Tailrace raises.

    TailraceError
    ├── DeviceError            devices asked for and devices there do not fit
    │   └── DeviceMemoryError  a device has not enough memory for an execution
    ├── DataError              a dataset or one of its elements breaks a rule
    │   ├── ElementError       an element differs from the first one (leaf path, shape, dtype)
    │   ├── DataExhausted      fewer elements than were asked for
    │   ├── ProducerError      the dataset itself raised; its exception is the cause
    │   └── DataTimeout        the dataset gave nothing for as long as `timeout_s` allows
    ├── DistributedError       processes that do not come together, or run different programs
    ├── FeedError              an infeed or outfeed used in a way it does not allow
    │   └── WaitStopped        waiting for data was ended from elsewhere, as by `trainer.stop()`
    ├── ProgramError           a program or a loop cannot be built or run
    │   ├── ReplicaError       replicas that do not fit, or values that would drift apart
    │   └── PipelineError      a model cannot be run as the pipeline that was asked for
    ├── OptionError            an option has a value it may not have
    ├── SelectionError         no tensor has the name that was asked for
    ├── PlanError              a pipeline schedule breaks a rule
    ├── RunError               a run directory cannot be written or read
    ├── CheckpointError        a checkpoint cannot be written or read, or does not fit
    ├── NonFiniteError         a NaN or Inf where `stop_on_nonfinite` watches
    ├── CorruptionError        the same computation gave other bits, where `sentinel=` watches
    ├── VersionError           a package is of a version that Tailrace does not know
    └── MissingDependency      an optional package is not installed

Some also derive from the built-in class that a caller would expect (`ValueError`, `TypeError`),
so that code which knows nothing of Tailrace can still catch them.
"""


class TailraceError(Exception):
    """The root of all errors raised by Tailrace."""


class DeviceError(TailraceError, RuntimeError):
    """The devices asked for are not there, or can no longer be chosen."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device has not enough memory for an execution; says what takes how much, and what helps."""


class DataError(TailraceError, ValueError):
    """A dataset, or one of its elements, breaks a rule."""


class ElementError(DataError):
    """An element does not look like the first one; the text names the leaf."""


class DataExhausted(DataError):
    """More elements were asked for than the dataset has."""


class ProducerError(DataError):
    """The dataset raised while it was read; that exception is `__cause__`."""


class DataTimeout(DataError, TimeoutError):
    """The dataset gave nothing for as long as `timeout_s` allows; the text names the element."""


class FeedError(TailraceError, RuntimeError):
    """An infeed or outfeed is used in a way that it does not allow."""


class WaitStopped(FeedError):
    """Waiting for data was ended from elsewhere; nothing is lost, and reading can go on."""


class DistributedError(TailraceError, RuntimeError):
    """Processes do not come together, or one of them runs something else; the text names it."""


class ProgramError(TailraceError, ValueError):
    """A program, loop or step function cannot be built or run as it is written."""


class ReplicaError(ProgramError):
    """The replicas do not fit the devices, or values would drift apart between them."""


class PipelineError(ProgramError):
    """A model cannot be run as the pipeline that was asked for."""


class OptionError(TailraceError, ValueError):
    """An option has a value that it may not have."""


class SelectionError(TailraceError, KeyError):
    """A selection matches no tensor, or no metric has a name; the text lists the nearest names."""

    __str__ = Exception.__str__  # a KeyError would show the sentence in quotes


class PlanError(TailraceError, ValueError):
    """A pipeline schedule cannot be made, or a plan breaks one of its rules."""


class RunError(TailraceError, OSError):
    """A run directory cannot be written or read; the text says what is there all the same."""


class CheckpointError(TailraceError, OSError):
    """A checkpoint cannot be written or read, or belongs to another training; the text says why."""


class NonFiniteError(TailraceError, ArithmeticError):
    """A watched tensor became NaN or infinite; the text says where and when.

    Attributes:
        step: the number of the first bad step.
        culprit: what made the first bad value, with operation, scope, source and row; or None.
        elements: those of the bad step, stacked leaf by leaf; or None.
    """

    step: int = -1
    culprit: object = None
    elements: object = None


class CorruptionError(TailraceError, RuntimeError):
    """The same computation gave other bits: a memory or a processor is at fault.

    Attributes:
        step: where.
        names: the tensors, or groups of tensors, that differ.
    """

    step: int = -1
    names: tuple[str, ...] = ()


class VersionError(TailraceError, RuntimeError):
    """A package has changed in what Tailrace relies on; the text says which versions go together."""


class MissingDependency(TailraceError, ImportError):
    """An optional package is needed and not installed; the text says how to install it."""

    @classmethod
    def for_feature(cls, feature: str, package: str, extra: str) -> "MissingDependency":
        """The one sentence that every missing package is reported with."""
        return cls(
            f"{feature} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'tailrace[{extra}]'."
        )
