"""Where sentences end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.preprocess.sentences import split_sentences


@pytest.mark.parametrize(
    "expected",
    [
        ["One.", "Two!", "Three?", "Four"],
        ["Mr. Smith met Dr. J. R. Brown, e.g. at 3.5 km.", "He left."],
        ['"Stop!" he message.', '"Why?"', "(Nobody knew.)", "Then it was 5 p.m. and late."],
        ["See Fig. 3 of vol. 2.", "It was sold by Acme Inc.", "Nobody bought it."],
        ["so she message... and went on.", "1984 was next."],
        ["Élan.", "Über alles.", "So did I.", "We were two."],
        ["これは一つ。", "これは二つ。", "end"],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(expected: list[str]) -> None:
    assert split_sentences(" ".join(expected), False) == expected


def test_an_empty_line_ends_a_sentence_and_newlines_can_be_kept() -> None:
    text = "A heading\n\nA sentence.\nAnother one. The last. \n"
    assert split_sentences(text, False) == ["A heading", "A sentence.", "Another one.", "The last."]
    assert split_sentences(text, True) == [
        "A heading\n\n", "A sentence.\n", "Another one.", "The last. \n"
    ]  # fmt: skip


@given(st.text(st.sampled_from("aB1 .!?\n\"'()。é")))
def test_nothing_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text, False)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentences)
