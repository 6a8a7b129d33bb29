"""Pieces of text concatenate to the decoded text, without broken characters or stop texts."""

from pathlib import Path

import pytest
import tokenizers

from megatron_zpp.text.detokenizer import WINDOW, IncrementalDetokenizer
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import ByteLevelTokenizer, NullTokenizer
from megatron_zpp.tokenizer.hugging_face import HFTokenizer
from megatron_zpp.tokenizer.sentence_piece import GPTSentencePieceTokenizer

BYTES = ByteLevelTokenizer()
TEXT = "Grüße, 世界! 🙂🏽 naïve — ok; " * 3


def pieces(tokenizer: Tokenizer, prompt: str, tokens: list[int], *stops: str) -> list[str]:
    """What each token brings, then what is left at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode(prompt), stops)
    decoded = []
    for token in tokens:
        decoded.append(detokenizer.feed(token))
        if detokenizer.stopped:
            break
    return [*decoded, detokenizer.finish()]


@pytest.mark.parametrize("prompt", ["", "before", "é"])
def test_bytes_become_whole_characters_at_once(prompt: str) -> None:
    """Each byte but the last of a character brings nothing; windows are left behind on the way."""
    decoded = pieces(BYTES, prompt, BYTES.encode(TEXT))
    assert len(TEXT.encode()) > 3 * WINDOW
    expected = []
    for character in TEXT:
        expected += [*[""] * (len(character.encode()) - 1), character]
    assert decoded == [*expected, ""]


def test_a_broken_end_shows_at_the_end_only() -> None:
    assert pieces(BYTES, "a", [0x62, 0xE4, 0xB8]) == ["b", "", "", "\ufffd"]
    assert pieces(BYTES, "a", [0xFF, 0xFF, 0x62]) == ["", "", "\ufffd\ufffdb", ""]


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        (b"a\xc3", b"\xa9b", "éb"),  # goes on in the middle of a character
        (b"a\xc3", b"bc", "bc"),  # which stays broken, and is the prompt's
        (b"a\xc3", b"\xc3", "\ufffd"),
        (b"a\xc3", b"", ""),
        ("a\ufffd".encode(), b"b", "b"),
        ("a\ufffd".encode(), "\ufffdb".encode(), "\ufffdb"),
    ],
)
def test_a_prompt_that_ends_broken(prompt: bytes, tokens: bytes, expected: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES, list(prompt))
    assert "".join([*map(detokenizer.feed, tokens), detokenizer.finish()]) == expected


def test_a_broken_byte_after_a_whole_character_loses_no_text(tmp_path: Path) -> None:
    """Llama's decoder takes a run of bytes as one: it then breaks the character before, too."""
    names = ["</s>", "x", "y", *(f"<0x{byte:02X}>" for byte in range(256))]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: number for number, name in enumerate(names)}, [])
    )
    decoders = tokenizers.decoders
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer, smile = HFTokenizer(str(tmp_path)), [3 + byte for byte in "🙂".encode()]
    broken = [*smile, *smile[:2], 1, 2, 1]
    detokenizer = IncrementalDetokenizer(tokenizer, [1])
    decoded = "".join([*map(detokenizer.feed, broken), detokenizer.finish()])
    assert decoded.startswith("🙂\ufffd") and decoded.endswith("\ufffdxyx")
    assert "".join(pieces(tokenizer, "x", smile * 12 + [1])) == "🙂" * 12 + "x"
    detokenizer = IncrementalDetokenizer(tokenizer, [1])
    decoded = "".join([*map(detokenizer.feed, broken[:6]), detokenizer.finish()])
    assert decoded.startswith("🙂\ufffd")


def test_long_broken_text_is_kept_whole() -> None:
    tokens = [0xFF] * (3 * WINDOW) + BYTES.encode("x")
    assert "".join(pieces(BYTES, "", tokens)) == "\ufffd" * (3 * WINDOW) + "x"


def test_spaces_between_prompt_and_text_are_kept() -> None:
    """The null tokenizer puts a space between two ids, not before the first."""
    assert pieces(NullTokenizer(50), "1 2", [3, 4]) == [" 3", " 4", ""]
    assert pieces(NullTokenizer(50), "", [3, 4]) == ["3", " 4", ""]


def test_a_space_that_a_tokenizer_drops_at_the_beginning_of_a_text(spaced: Tokenizer) -> None:
    """SentencePiece decodes a word alone without its space; after a prompt the space is there."""
    words = "the cat sat on the mat " * 12
    tokens = spaced.encode(words)
    assert spaced.decode(tokens[1:2]) != "".join(pieces(spaced, "the", tokens[1:2]))
    assert "the " + "".join(pieces(spaced, "the", tokens[1:])).strip() == words.strip()


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "m"), vocab_size=20,
        model_type="word", minloglevel=3, hard_vocab_limit=False,
    )  # fmt: skip
    return GPTSentencePieceTokenizer(str(folder / "m.model"))


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN END two", ["END"], "one EN "),
        ("aab", ["aab"], ""),
        ("aaab", ["aab"], "a"),
        ("no stop EN", ["END"], "no stop EN"),
        ("x\n\ny", ["y", "\n\n"], "x"),
        ("世界!", ["界"], "世"),
        ("abc", ["bc", "c", "b"], "a"),
        ("abcd", ["abcdef", "bc"], "a"),
    ],
)
def test_stops(text: str, stops: list[str], expected: str) -> None:
    decoded = pieces(BYTES, "p", BYTES.encode(text), *stops)
    assert "".join(decoded) == expected
    shown = ""
    for piece in decoded:  # nothing is shown and taken back
        shown += piece
        assert expected.startswith(shown)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    assert pieces(BYTES, "", BYTES.encode("aEbEND"), "END") == ["a", "", "Eb", "", "", "", ""]


def test_a_stop_may_not_reach_into_the_prompt() -> None:
    assert "".join(pieces(BYTES, "EN", BYTES.encode("D"), "END")) == "D"
