"""Tables of results as data: a column says which number of a row it shows, and in which unit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, object]


@dataclass(frozen=True)
class Column:
    """A column of a table of rows.

    value: the key of the row's value, or a function of the row. form: the format of a number;
    scale: what it is multiplied by before. A pair of numbers, such as quartiles, is shown as a
    range, and None as "-".
    """

    title: str
    value: str | Callable[[Row], object]
    form: str = ""
    scale: float = 1

    def cell(self, row: Row) -> str:
        """The text of a row's cell."""
        value = self.value(row) if callable(self.value) else row[self.value]
        return self._text(value)

    def _text(self, value: object) -> str:
        if value is None:
            return "-"
        if isinstance(value, (list, tuple)):
            return " to ".join(map(self._text, value))
        if isinstance(value, str):
            return value
        return format(value * self.scale if self.scale != 1 else value, self.form)


RATIOS = (Column("ratio", "ratio", ".3f"), Column("its quartiles", "quartiles", ".3f"))


def table(
    rows: Iterable[Row], *columns: Column, bold: Callable[[Row], bool] = lambda row: False
) -> str:
    """A Markdown table with a line for each row, in bold type where `bold` says so."""
    cells = [
        [f"**{column.cell(row)}**" if bold(row) else column.cell(row) for column in columns]
        for row in rows
    ]
    return markdown_table([column.title for column in columns], cells)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are text already, padded so that it can be read as text."""
    lines = [titles, *rows]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        for first, *others in (lines[0], rule, *lines[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
