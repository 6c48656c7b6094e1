"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with aligned columns, without a final line break.

    Args:
        columns: the headings of the columns.
        rows: each has one value per column; None gives an empty cell.

    Raises:
        ValueError: for a row with more or fewer cells than there are columns.
    """
    lines = [list(columns)]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells and the table {len(columns)} columns")
        lines.append(["" if cell is None else str(cell) for cell in row])
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    padded = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in lines)
    return "\n".join(f"| {line} |" for line in padded)
