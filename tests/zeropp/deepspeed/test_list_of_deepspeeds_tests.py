"""`docs/deepspeed_tests.md` counts right, and names a test of ours for each subject that works."""

import re
from collections import Counter

from tests.launched import ROOT

PAGE = (ROOT / "docs/deepspeed_tests.md").read_text()
ROW = re.compile(
    r"^\| ((?:Test\w+\.)?test[\w\\]*) \| (works|no|internals) \| (.+) \|$", re.MULTILINE
)
LEAST = 0.75  # of what is not internal


def test_the_counts_are_those_of_the_rows():
    rows = ROW.findall(PAGE)
    files = re.findall(r"^## (\S+\.py)$", PAGE, re.MULTILINE)
    assert len(rows) == PAGE.count("\n| ") - len(files)  # no row of a table is left out
    counts = Counter(status for _, status, _ in rows)
    public = counts["works"] + counts["no"]
    for text in (
        f"{len(rows)} test functions are in these {len(files)} files",
        f"{counts['internals']} of them look only at internals",
        f"Of the other {public}, the subjects of **{counts['works']} work** "
        f"({counts['works'] / public:.0%})",
        f"and {counts['no']} do not",
    ):
        assert text in PAGE, text
    assert counts["works"] >= LEAST * public
    short = (ROOT / "docs/deepspeed.md").read_text()
    assert f"{counts['works']} of {public} test functions" in " ".join(short.split())


def test_what_works_has_a_test_and_what_does_not_has_a_reason():
    for name, status, text in ROW.findall(PAGE):
        ours = re.findall(r"`(test_\w+)`", text)  # test_docs.py looks for them
        assert bool(ours) is (status == "works"), name
    for section in PAGE.split("\n## ")[1:]:
        names = [name for name, _, _ in ROW.findall(section)]
        assert names and len(names) == len(set(names)), section[:60]


def test_the_short_table_counts_its_own_rows():
    page = (ROOT / "docs/deepspeed.md").read_text()
    statuses = re.findall(r"^\| [^|]+ \| (works|no|differs) \|", page, re.MULTILINE)
    count = f"{statuses.count('works')} of {len(statuses)} subjects work"
    assert count in " ".join(page.split()), count
