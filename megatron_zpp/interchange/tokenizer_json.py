"""Tokenizers without a tokenizer.json of their own, as one: bytes, and SentencePiece's models."""

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Model

from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import load_package
from megatron_zpp.tokenizer.gpt2_bpe import byte_alphabet

BLANK = "▁"  # what SentencePiece writes for a blank
UNIGRAM, BPE = 1, 2  # model types of a SentencePiece model
UNUSUAL = " \u00a0two  blanks\n\t\U0010fffd\u4e2d\u0301 "


def byte_level_json(tokenizer: Tokenizer) -> str:
    """Return the tokenizer.json of a ByteLevelTokenizer."""
    model = Model(models.BPE(byte_alphabet(), []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    _add_special(model, tokenizer.reserved.values())
    return model.to_str(pretty=True)


def sentence_piece_json(content: bytes, tokenizer: Tokenizer, *, opens: bool) -> str | None:
    """Return the tokenizer.json that makes the ids of a SentencePiece model, given as its file.

    `opens` puts begin of sentence before every text. None for a model that a tokenizer.json cannot
    be: if it is of another kind than BPE and unigram, or makes other ids of the model's own pieces
    than `tokenizer`.
    """
    proto = load_package("sentencepiece.sentencepiece_model_pb2", tokenizer.name).ModelProto()
    proto.ParseFromString(content)
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        return None
    kind = type(proto.pieces[0])
    model = Model(_model(proto, kind))
    model.normalizer = _normalizer(proto.normalizer_spec)
    model.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [piece.piece for piece in proto.pieces if piece.type in (kind.CONTROL, kind.UNKNOWN)]
    _add_special(model, [*special, *tokenizer.reserved.values()])
    if opens:
        begin = proto.trainer_spec.bos_piece
        model.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, model.token_to_id(begin))]
        )
    written = (kind.NORMAL, kind.USER_DEFINED)
    words = [piece.piece.replace(BLANK, " ") for piece in proto.pieces if piece.type in written]
    texts = [*words, "".join(words), "".join(reversed(words)), "", UNUSUAL]
    is_same = all(model.encode(text).ids == tokenizer.encode(text) for text in texts)
    return model.to_str(pretty=True) if is_same else None


def _add_special(model: Model, names: Iterable[str]) -> None:
    """Add tokens; those that are not in the vocabulary get the next ids."""
    model.add_special_tokens([AddedToken(name, normalized=False) for name in names])


def _model(proto: Any, kind: Any) -> models.Model:
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    has_bytes = proto.trainer_spec.byte_fallback
    unknown = next(n for n, piece in enumerate(proto.pieces) if piece.type == kind.UNKNOWN)
    if proto.trainer_spec.model_type == UNIGRAM:
        return models.Unigram(scores, unk_id=unknown, byte_fallback=has_bytes)
    ids = {piece: number for number, (piece, _) in enumerate(scores)}
    merges = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], (piece[:cut], piece[cut:]))
        for piece, score in scores
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return models.BPE(
        ids,
        [pair for *_, pair in sorted(merges)],
        unk_token=scores[unknown][0],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
