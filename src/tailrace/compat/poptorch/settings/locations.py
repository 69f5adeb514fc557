"""Where tensors are stored: settings of the IPU, of which one has an effect here."""

from __future__ import annotations

from typing import Any

from tailrace.compat.poptorch.settings.containers import OptionsDict, noted
from tailrace.torch.errors import UsageError


class TensorLocationSettings(OptionsDict):
    """Where a kind of tensor is stored; setters can be chained.

    Optimizer state can be kept in the host's memory and sharded over replicas. Other kinds of
    tensors stay on the device here.

    >>> from tailrace.compat import poptorch
    >>> host = poptorch.TensorLocationSettings().useOnChipStorage(False)
    >>> options = poptorch.Options()
    >>> options.TensorLocations.setOptimizerLocation(host).location_optimizer
    {'onChip': 0}
    """

    def __init__(self) -> None:
        super().__init__(settings={})

    def _put(self, **values: Any) -> TensorLocationSettings:
        self._check_not_frozen()
        # Past `set`: the settings are empty at first, so there are no types to compare with.
        self._values["settings"].update(values)
        return self

    def useOnChipStorage(self, use_on_chip_storage: bool | None) -> TensorLocationSettings:
        """Whether on the device (True) or in the host's memory (False).

        Args:
            use_on_chip_storage: True, False or None for the default.

        Raises:
            UsageError: it is not a bool.
        """
        _typed("useOnChipStorage", use_on_chip_storage, bool, optional=True)
        # 0 and 1: the original's settings are numbers, and programs read them.
        return self._put(onChip=None if use_on_chip_storage is None else int(use_on_chip_storage))

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Smaller tensors stay on the device.

        Args:
            min_elements: a number of elements.

        Raises:
            UsageError: it is not an int.
        """
        return self._put(minElementsForOffChip=_typed("minElementsForOffChip", min_elements, int))

    def useReplicatedTensorSharding(self, use_rts: bool = True) -> TensorLocationSettings:
        """Whether each replica keeps a share of the tensors.

        Args:
            use_rts: whether it does.

        Raises:
            UsageError: it is not a bool.
        """
        return self._put(useReplicatedTensorSharding=int(_typed("useRTS", use_rts, bool)))

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Smaller tensors are not sharded.

        Args:
            min_elements: a number of elements.

        Raises:
            UsageError: it is not an int.
        """
        value = _typed("minElementsForReplicatedTensorSharding", min_elements, int)
        return self._put(minElementsForReplicatedTensorSharding=value)

    def useIOTilesToLoad(self, use_io_tiles: bool = True) -> TensorLocationSettings:
        """IPU only: accepted, without effect.

        Args:
            use_io_tiles: without effect.

        Raises:
            UsageError: it is not a bool.
        """
        return self._put(useIOTilesToLoad=int(_typed("useIOTilesToLoad", use_io_tiles, bool)))

    def useIOTilesToStore(self, use_io_tiles: bool = True) -> TensorLocationSettings:
        """IPU only: accepted, without effect.

        Args:
            use_io_tiles: without effect.

        Raises:
            UsageError: it is not a bool.
        """
        return self._put(useIOTilesToStore=int(_typed("useIOTilesToStore", use_io_tiles, bool)))


class TensorLocationOptions(OptionsDict):
    """`options.TensorLocations`: where kinds of tensors are stored.

    >>> from tailrace.compat import poptorch
    >>> shared = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
    >>> locations = poptorch.Options().TensorLocations.setOptimizerLocation(shared)
    >>> locations.location_optimizer
    {'useReplicatedTensorSharding': 1}
    """

    def __init__(self) -> None:
        super().__init__(
            location_activation={},
            location_weight={},
            location_optimizer={},
            location_accumulator={},
        )

    def _locate(self, kind: str, location: TensorLocationSettings) -> TensorLocationOptions:
        if not isinstance(location, TensorLocationSettings):
            raise UsageError(
                f"A location is a poptorch.TensorLocationSettings. Received: {type(location).__name__}"
            )
        # A copy: the object may be changed and used for another kind of tensor.
        self.set(**{f"location_{kind}": dict(location.settings)})
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Where activations are stored: always on the device here.

        Args:
            location: a `TensorLocationSettings`.

        Raises:
            UsageError: it is not one.
        """
        noted("setActivationLocation")
        return self._locate("activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Where weights are stored: always on the device here.

        Args:
            location: a `TensorLocationSettings`.

        Raises:
            UsageError: it is not one.
        """
        noted("setWeightLocation")
        return self._locate("weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Where optimizer state is stored; `useOnChipStorage(False)` keeps it in the host's memory.

        Args:
            location: a `TensorLocationSettings`.

        Raises:
            UsageError: it is not one.
        """
        return self._locate("optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> TensorLocationOptions:
        """Where accumulators are stored: always on the device here.

        Args:
            location: a `TensorLocationSettings`.

        Raises:
            UsageError: it is not one.
        """
        noted("setAccumulatorLocation")
        return self._locate("accumulator", location)

    def numIOTiles(self, num_tiles: int) -> TensorLocationOptions:
        """IPU only: accepted, without effect.

        Args:
            num_tiles: the number of tiles.

        Raises:
            UsageError: the number is odd, or not between 32 and 192.
        """
        if not isinstance(num_tiles, int) or num_tiles % 2 or not 32 <= num_tiles <= 192:
            raise UsageError("numIOTiles must be an even number between 32 and 192.")
        noted("numIOTiles")
        return self


def _typed(name: str, value: object, kind: type, optional: bool = False) -> Any:
    if optional and value is None:
        return value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{name} takes {kind.__name__}. Received: {value!r}")
    return value
