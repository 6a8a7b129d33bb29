"""The journal: a run that an earlier version has begun can be resumed."""

import json

from megatron_zpp.preprocess.chunks import Position
from megatron_zpp.preprocess.partial_output import Journal, Totals

ENTRIES = {
    "place": {"file": 2, "offset": 300, "number": 4},
    "count": {"documents": 5, "tokens": 60, "blank": 1, "invalid": 1, "first_invalid": "a, line 2"},
    "read": 700,
    "sizes": [[120, 20, 48]],
    "complete": False,
}


def test_the_entries_of_a_journal_keep_their_names() -> None:
    journal = Journal(
        position=Position(file=2, offset=300, number=4),
        totals=Totals(documents=5, tokens=60, blank=1, invalid=1, first_invalid="a, line 2"),
        bytes_read=700,
        sizes=((120, 20, 48),),
    )
    entries = json.loads(json.dumps(journal.to_json()))
    assert entries == ENTRIES
    assert Journal.from_json(entries).to_json() == entries
