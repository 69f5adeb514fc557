"""Several processes, with the original's names; collectives between hosts are not supported.

In: processes that `tailrace launch` or `tr.distributed.initialize` has joined. Out: a strategy over all
of them.
Rule: nothing here starts or joins processes.
"""

from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__, {"popdist_strategy": f"{__name__}.popdist_strategy"})
