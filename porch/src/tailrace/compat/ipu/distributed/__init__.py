"""Several processes in the words of the original; collectives between hosts are not here."""

from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__, {"popdist_strategy": f"{__name__}.popdist_strategy"})
