"""The page of DeepSpeed's tests counts what its table and its lists have, and says how it ran."""

import re
from collections import Counter

from tests.launched import ROOT

PAGE = (ROOT / "benchmarks/results/2026-11-27-deepspeed-tests.md").read_text()
TEXT = " ".join(PAGE.split())
ROW = re.compile(r"^\| (\S+\.py) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
LEAST = 209  # functions that pass


def listed(text: str) -> Counter:
    """How many functions a list names, by file."""
    counts: Counter = Counter()
    for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
        file, names = re.match(r"(\S+\.py):\s+(.*?)\n*(?=\n\n|\Z)", item, re.DOTALL).groups()
        functions = re.split(r",\s+", names)
        assert len(functions) == len(set(functions)), file
        counts[file] += len(functions)
    return counts


def test_the_counts_are_those_of_the_table():
    rows = {file: [*map(int, numbers)] for file, *numbers in ROW.findall(PAGE)}
    assert len(rows) == PAGE.count("\n| ") - 1 and all(
        row[0] == sum(row[1:]) for row in rows.values()
    )
    functions, passed, skipped, failed = map(sum, zip(*rows.values(), strict=True))
    for text in (
        "at its commit edaa7221 (0.19.6)",
        f"The {len(rows)} files are",
        f"They have {functions} test functions: **{passed} pass**, {skipped} are skipped, and "
        f"{failed} fail",
    ):
        assert text in TEXT, text
    assert passed >= LEAST


def test_each_function_that_fails_or_is_skipped_is_named():
    rows = {file: [*map(int, numbers)] for file, *numbers in ROW.findall(PAGE)}
    before, after = PAGE.split("## Why tests fail")
    failing, skipped = after.split("## What is skipped")
    total = Counter()
    for part in failing.split("\n### ")[1:]:
        found = listed(part)
        assert part.startswith(f"{found.total()} "), part[:60]
        total += found
    assert total == Counter({file: row[3] for file, row in rows.items() if row[3]})
    assert listed(skipped) == Counter({file: row[2] for file, row in rows.items() if row[2]})
    internals = next(part for part in failing.split("\n### ") if "DeepSpeed's own classes" in part)
    functions, passed, *_ = map(sum, zip(*rows.values(), strict=True))
    public = functions - listed(skipped).total() - listed(internals).total()
    assert f"Of the {public} that are neither skipped nor look at internals, that is " in TEXT
    assert f"that is {passed / public:.0%}." in TEXT


def test_the_short_table_counts_its_own_rows():
    page = (ROOT / "docs/deepspeed.md").read_text()
    statuses = re.findall(r"^\| [^|]+ \| (works|no|differs) \|", page, re.MULTILINE)
    count = f"{statuses.count('works')} of {len(statuses)} subjects work"
    assert count in " ".join(page.split()), count
    passed = re.search(r"\*\*(\d+) pass\*\*", TEXT)[1]
    assert f"{passed} of DeepSpeed's own test functions pass" in " ".join(page.split())
