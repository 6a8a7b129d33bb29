"""The files are Megatron-LM's, byte by byte.

tests/data holds two datasets that Megatron-LM's own program made with GPT-2's vocabulary, and the
part of that vocabulary that their text needs: merges that never happen in a text change nothing.
"""

import json
from pathlib import Path

import pytest

from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import build_tokenizer
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT
from tests.megatron_zpp.preprocess.runs import documents_of, run

DATA = Path(__file__).resolve().parents[2] / "data"
GPT2 = TokenizerConfig(
    vocab_file=str(DATA / "gpt2_part" / "vocab.json"),
    merge_file=str(DATA / "gpt2_part" / "merges.txt"),
)


@pytest.mark.parametrize("library", ["tiktoken", "fastokens"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_files_are_megatrons(tmp_path: Path, name: str, library: str) -> None:
    tokenizer = build_tokenizer(GPT2)
    source = tmp_path / "a.jsonl"
    with open(source, "w") as file:
        for sequences in documents_of(DATA / f"{name}_text_document"):
            assert all(ids[-1] == 50256 for ids in sequences)
            text = tokenizer.decode([token for ids in sequences for token in ids[:-1]])
            file.write(json.dumps({"text": text}) + "\n")
    prefix = run(source, tmp_path / "x", GPT2, append_eod=True, bpe_library=library)
    for end in ("bin", "idx"):
        expected = (DATA / f"{name}_text_document.{end}").read_bytes()
        assert prefix.with_name(f"{prefix.name}.{end}").read_bytes() == expected


def test_the_name_of_the_end_of_a_document_is_ordinary_text(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": f"{END_OF_DOCUMENT} a"}) + "\n")
    documents = documents_of(run(source, tmp_path / "x", GPT2, append_eod=True))
    assert documents == [[[27, 91, 437, 1659, 5239, 91, 29, 257, 50256]]]
