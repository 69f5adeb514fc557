"""Which threads of ours are alive."""

import threading


def infeed_threads() -> set[threading.Thread]:
    """The threads of infeeds that are alive now."""
    return {t for t in threading.enumerate() if t.name.startswith("tailrace-infeed")}
