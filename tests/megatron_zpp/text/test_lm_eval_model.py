"""The lm-evaluation-harness gets the same numbers from our model as from transformers."""

from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("lm_eval", reason='pip install "megatron-zpp[eval]"')

import json

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_zpp.interchange.open_model import open_model  # noqa: E402
from megatron_zpp.text.generate import Request, complete  # noqa: E402
from megatron_zpp.text.lm_eval_model import opened_by  # noqa: E402
from megatron_zpp.text.sampling import Sampling  # noqa: E402
from megatron_zpp.text.text_model import TextModelConfig, shard_text_model  # noqa: E402
from megatron_zpp.tokenizer.base import ByteLevelTokenizer  # noqa: E402
from tests.megatron_zpp.interchange.foreign_models import (  # noqa: E402
    WORDS,
    add_tokenizer,
    llama,
    saved,
)
from tests.megatron_zpp.text.peaked_model import (  # noqa: E402
    POSITIONS,
    log_probabilities,
    peaked_model,
)
from tests.megatron_zpp.text.test_text_model import joined  # noqa: E402
from tests.megatron_zpp.text.text_models import save_text_model  # noqa: E402
from tests.ranks import ranks  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

OurLM = opened_by(open_model)
# Logits of the two implementations differ by 1e-5 (test_convert_hf), over up to 60 tokens.
CLOSE = dict(abs=2e-4)


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=item, idx=index)
        for index, item in enumerate(arguments)
    ]


@pytest.fixture(params=[False, True], ids=["no begin of sentence", "begin of sentence"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[OurLM, HFLM]:
    """Ours and theirs of one folder, with a tokenizer of words."""
    folder = saved(llama(vocab_size=len(WORDS)), tmp_path / "llama")
    add_tokenizer(folder, opens=request.param)
    ours = OurLM.create_from_arg_string(f"pretrained={folder}", {"batch_size": "2"})
    theirs = HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=1,
        prefix_token_id=ours.prefix_token_id,
    )  # fmt: skip
    assert ours.max_length == theirs.max_length
    return ours, theirs


def test_loglikelihood(both: tuple[OurLM, HFLM]) -> None:
    """Short and empty contexts, one that is cut, and more requests than a batch has."""
    long_context = " ".join(WORDS[1 + index % 9] for index in range(2 * both[0].max_length))
    pairs = [
        ("the cat", " sat"), ("the cat ", "sat on mat"), ("", "dog ran"), ("a dog", " ran to it"),
        (long_context, " mat and a"),
    ]  # fmt: skip
    answers, expected = (lm.loglikelihood(instances("loglikelihood", *pairs)) for lm in both)
    for (value, is_greedy), (expected_value, expected_greedy) in zip(
        answers, expected, strict=True
    ):
        assert value == pytest.approx(expected_value, **CLOSE)
        assert is_greedy == expected_greedy


def test_loglikelihood_rolling(tmp_path: Path) -> None:
    """Texts of one window and of several; each token is scored once."""
    folder = saved(llama(vocab_size=len(WORDS)), tmp_path / "llama")
    add_tokenizer(folder, opens=False)
    arguments = {"pretrained": str(folder), "max_length": 8}
    ours = OurLM.create_from_arg_obj(arguments)
    theirs = HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", max_length=8,
        prefix_token_id=ours.prefix_token_id,
    )  # fmt: skip
    texts = [("the cat sat",), (" ".join(WORDS[1 + index % 9] for index in range(21)),)]
    answers, expected = (
        lm.loglikelihood_rolling(instances("loglikelihood_rolling", *texts))
        for lm in (ours, theirs)
    )
    assert answers == pytest.approx(expected, **CLOSE)


def test_generate_until(both: tuple[OurLM, HFLM]) -> None:
    settings = {"max_gen_toks": 8, "do_sample": False}
    contexts = ["the cat", "a dog ran", "sat on", "mat", "the dog sat on the mat and a"]
    free = [(context, {"until": [], **settings}) for context in contexts]
    ours, theirs = both
    written = ours.generate_until(instances("generate_until", *free))
    assert any(len(text.split()) > 3 for text in written)
    stop = next(text for text in written if len(text.split()) > 3).split()[2]
    stopped = [(context, {"until": [stop], **settings}) for context in contexts]
    for requests in (free, stopped):
        answers, expected = (
            lm.generate_until(instances("generate_until", *requests)) for lm in both
        )
        assert [text.split() for text in answers] == [text.split() for text in expected]


def test_sampled_texts_differ_by_their_seed() -> None:
    lm = OurLM(peaked_model(), batch_size=2)
    request = ("ab", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 9, "num_beams": 1})
    texts = lm.generate_until(instances("generate_until", request, request))
    assert texts[0] != texts[1]
    assert texts == lm.generate_until(instances("generate_until", request, request))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "--load is missing"),
        ({"pretrained": "nowhere"}, "nowhere: expected a folder of checkpoints"),
        ({"pretrained": "x", "dtype": "fp64"}, "--dtype fp64: expected one of"),
        ({"pretrained": "x", "speed": 3, "b": 1}, "no model argument b, speed"),
    ],
)
def test_model_arguments_that_are_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        OurLM.create_from_arg_obj(arguments, {"batch_size": 1, "device": "cuda:0"})


def test_sizes_that_are_wrong() -> None:
    model = peaked_model()
    for batch_size in ("auto", "0", 0, "1.5"):
        with pytest.raises(InputError, match=f"--batch_size {batch_size}: expected a whole"):
            OurLM(model, batch_size)
    with pytest.raises(InputError, match="--seq-length 33: the model has 32 positions"):
        OurLM(model, 1, 33)


@pytest.mark.parametrize(
    ("kind", "request_arguments", "message"),
    [
        ("loglikelihood", ("a", "b" * 33), "has 33 tokens, expected 1 to 32"),
        ("generate_until", ("a", {}), "256 new tokens leave no room for a prompt"),
        ("generate_until", ("a", {"max_gen_toks": 32}), "32 new tokens leave no room"),
        ("generate_until", ("a", {"max_gen_toks": 3, "num_beams": 4}), "with num_beams=4"),
        ("generate_until", ("a", {"max_gen_toks": 3, "top_p": 2.0}), "top_p 2.0: expected more"),
    ],
)
def test_requests_that_are_refused(kind: str, request_arguments: tuple, message: str) -> None:
    lm = OurLM(peaked_model())
    with pytest.raises(InputError, match=message):
        getattr(lm, kind)(instances(kind, request_arguments))


def test_a_context_of_spaces_and_a_context_that_fills_the_model() -> None:
    """As plain arithmetic has it: spaces belong to the continuation, 32 positions predict 32."""
    model = peaked_model()
    lm = OurLM(model)
    answers = lm.loglikelihood(instances("loglikelihood", ("  ", "a"), ("x" * 40 + "b", "cd")))
    expected = log_probabilities(model.model, [model.tokenizer.eod, *b"  a"], 1)[0]
    assert answers[0][0] == pytest.approx(sum(expected), **CLOSE)
    ids = [*b"x" * (POSITIONS - 2), *b"bcd"]
    assert len(ids) == POSITIONS + 1
    expected = log_probabilities(model.model, ids, POSITIONS - 1)[0]
    assert answers[1][0] == pytest.approx(sum(expected), **CLOSE)


def test_chat_template(tmp_path: Path) -> None:
    """Special tokens of the template are one id each, and nothing else is put before the prompt."""
    vocabulary = write_chat_files(tmp_path)
    save_text_model(tmp_path / "saved")
    arguments = {
        "pretrained": str(tmp_path / "saved"),
        "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path),
    }  # fmt: skip
    plain = OurLM(peaked_model())
    with pytest.raises(InputError, match="peaked: its tokenizer comes without a chat template"):
        plain.apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(InputError, match="another tokenizer"):
        OurLM.create_from_arg_obj(arguments)
    folder = saved(llama(vocab_size=len(vocabulary)), tmp_path / "llama")
    write_chat_files(folder)
    lm = OurLM.create_from_arg_obj({"pretrained": str(folder)})
    begin, end = vocabulary["<|begin|>"], vocabulary["<|end|>"]
    assert lm.tok_encode("<|begin|>user<|end|>")[::5] == [begin, end]
    assert "<|begin|>" in lm.chat_template(True) and lm.chat_template(False) == ""
    history = [{"role": "user", "content": "Hi"}]
    ids = lm.tok_encode(lm.apply_chat_template(history))
    assert ids.count(begin) == 2 and ids.count(end) == 1 and ids[0] == begin
    history.append({"role": "assistant", "content": "The best"})
    prefilled = lm.apply_chat_template(history, add_generation_prompt=False)
    assert prefilled.endswith("<|begin|>assistant\nThe best")
    write_chat_files(folder, template="{{ raise_exception('roles must alternate') }}")
    refusing = OurLM.create_from_arg_obj({"pretrained": str(folder)})
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        refusing.apply_chat_template(history)


@ranks(2)
def test_on_ranks_that_share_the_weights(tmp_path: Path) -> None:
    """All three kinds of requests, as the whole model answers; fewer batches than ranks, too."""
    whole, eod = save_text_model(tmp_path / "saved"), ByteLevelTokenizer().eod
    prompts = ["ab", "hello", "c"]
    sampling = Sampling(temperature=0)
    expected_texts = complete(
        whole, ByteLevelTokenizer(),
        [Request(prompt=tuple(text.encode()), max_new_tokens=5, sampling=sampling)
         for text in prompts],
    )  # fmt: skip
    model = shard_text_model(
        TextModelConfig(load=str(tmp_path / "saved")), None, joined(), open_model
    )
    assert model.sharding.num_ranks == 2
    if dist.get_rank():
        model.follow()
        return
    lm = OurLM(model, batch_size=2)
    for pairs in ([("ab", "c")], [("", "hello"), ("x" * 70, "yz"), ("q", "rst"), ("a b", " c d")]):
        answers = lm.loglikelihood(instances("loglikelihood", *pairs))
        for (context, continuation), answer in zip(pairs, answers, strict=True):
            ids = [*(context.encode() or [eod]), *continuation.encode()][-65:]
            values, is_greedy = log_probabilities(whole, ids, len(ids) - len(continuation))
            assert answer == (pytest.approx(sum(values), **CLOSE), is_greedy)
    texts = ["hello " * 30, "a"]
    rolling = lm.loglikelihood_rolling(
        instances("loglikelihood_rolling", *((text,) for text in texts))
    )
    ids = [eod, *texts[0].encode()]
    windows = [(ids[:65], 1), (ids[64:129], 1), (ids[116:], 13)]  # the last one is full as well
    total = sum(sum(log_probabilities(whole, window, first)[0]) for window, first in windows)
    single = sum(log_probabilities(whole, [eod, *b"a"], 1)[0])
    assert rolling == pytest.approx([total, single], **CLOSE)
    requests = [(text, {"max_gen_toks": 5}) for text in prompts]
    assert lm.generate_until(instances("generate_until", *requests)) == expected_texts
    model.close()


SPECIAL = ("<|begin|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}\n"
    "<|begin|>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|begin|>assistant\n{% endif %}"
)


def write_chat_files(folder: Path, template: str = TEMPLATE) -> dict[str, int]:
    """Write them; returns the vocabulary, 256 bytes and the 2 special tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<|end|>"}
    config = {"eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab(with_added_tokens=True)
