"""Tables: units, ranges, what is missing, and that they can be read as text."""

from benchmarks.shared.table import RATIOS, Column, table


def test_columns_say_unit_and_format_and_cells_are_padded() -> None:
    rows = [
        {"name": "a", "seconds": 0.0015, "ratio": 1.0, "quartiles": [0.5, 2.0], "bytes": None},
        {"name": "longer", "seconds": 2.0, "ratio": None, "quartiles": None, "bytes": 3_000_000},
    ]
    columns = Column("ms", "seconds", ".1f", 1e3), Column("MB", lambda row: row["bytes"], "", 1e-6)
    assert table(rows, Column("", "name"), *columns, *RATIOS).splitlines() == [
        "|        |     ms |  MB | ratio |  its quartiles |",
        "| ------ | -----: | --: | ----: | -------------: |",
        "| a      |    1.5 |   - | 1.000 | 0.500 to 2.000 |",
        "| longer | 2000.0 | 3.0 |     - |              - |",
    ]
