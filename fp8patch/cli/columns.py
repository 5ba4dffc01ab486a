"""Which columns of a table are shown where a terminal is too narrow for all of them."""

from collections.abc import Sequence

__all__ = ["fitting", "left_out"]

# Between two columns: a space each of `box.SIMPLE_HEAD` and of a padding of (0, 1, 0, 0).
_GAP = 2
# Of the first column, which names what a row is about and folds: it never goes.
_LEAST = 24


def fitting(
    names: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str], width: int
) -> list[int]:
    """Places of the columns to show in `width` characters.

    Args:
        names: Heads, each of them once.
        rows: Cells, with markup.
        drop: Names of columns that may go, those that go first at the front; empty ones before.
    """
    from rich.text import Text

    widths = [
        max(len(name), *(Text.from_markup(row[at]).cell_len for row in rows), 0)
        for at, name in enumerate(names)
    ]
    widths[0] = min(widths[0], max(_LEAST, width // 3))
    shown = list(range(len(names)))
    empty = [name for name in drop if not any(row[names.index(name)] for row in rows)]
    for name in dict.fromkeys([*empty, *drop]):
        if sum(widths[at] + _GAP for at in shown) - _GAP <= width:
            break
        shown.remove(names.index(name))
    return shown


def left_out(names: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> str:
    """A sentence on the columns that are not shown, and hold something; empty without any."""
    gone = [n for at, n in enumerate(names) if at not in shown and any(row[at] for row in rows)]
    if not gone:
        return ""
    return f"Left out for want of room: {', '.join(gone)}. A wider terminal, or a pipe, has all."
