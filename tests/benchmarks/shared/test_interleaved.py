"""Work in turn: its order, and the statistics of its times."""

import pytest

from benchmarks.shared.interleaved import interleaved, quartiles, ratio_summary, time_interleaved


def test_every_second_round_runs_backwards() -> None:
    assert list(interleaved(["a", "b", "c"], 3)) == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_each_work_has_one_time_per_round() -> None:
    calls = []
    works = {name: (lambda name=name: calls.append(name)) for name in "ab"}

    def seconds_of(work) -> float:
        work()
        return float(len(calls))

    assert time_interleaved(works, 2, seconds_of) == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert calls == ["a", "b", "b", "a"]


def test_ratios_are_taken_round_by_round() -> None:
    summary = ratio_summary([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert summary == {"ratio": 2.0, "quartiles": [1.0, 3.0]}
    with pytest.raises(ValueError):
        ratio_summary([1.0], [1.0, 2.0])


def test_quartiles_of_few_values_are_their_ends() -> None:
    assert quartiles([3.0, 1.0, 2.0]) == [1.0, 3.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0]) == [1.25, 3.75]
