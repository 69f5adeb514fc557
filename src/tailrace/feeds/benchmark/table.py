"""The figures of a benchmark as a table."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def benchmark_table(benchmark_json: str, title: str = "") -> "Table":
    """The result of `dataset_benchmark` as a `rich` table.

    >>> from tailrace.feeds.benchmark.measure import dataset_benchmark
    >>> table = benchmark_table(dataset_benchmark([1.0] * 4, epochs=2, elements_per_epoch=2))
    >>> table.row_count
    2
    """
    from rich.table import Table  # late: importing it takes time that most callers save

    table = Table(title=title or None)
    for heading in ("epoch", "elements", "MB", "seconds", "elements/s", "GB/s"):
        table.add_column(heading, justify="right")
    for number, epoch in enumerate(json.loads(benchmark_json)["epochs"]):
        table.add_row(
            str(number),
            f"{epoch['elements_processed']:,}",
            f"{epoch['total_bytes_processed'] / 1e6:,.2f}",
            f"{epoch['time_elapsed']:.4f}",
            f"{epoch['elements_per_second']:,.0f}",
            f"{epoch['bandwidth']:.3f}",
        )
    return table
