"""Our models in EleutherAI's lm-evaluation-harness: `--model megatron-zpp` of its command line.

The class answers the harness's three kinds of requests. On several ranks the harness runs on rank 0
only, with all requests; the other ranks are in `TextModel.follow`.
"""

from collections.abc import Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

from megatron_zpp.checkpoint.open_model import OpenModel, open_checkpoint
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.text.generate import Request
from megatron_zpp.text.sampling import Sampling
from megatron_zpp.text.scoring import Passage, batches_by_length
from megatron_zpp.text.text_model import TextModel, TextModelConfig, open_text_model
from megatron_zpp.tokenizer.base import load_package
from zeropp.errors import InputError
from zeropp.ranks import Environment

MAX_NEW_TOKENS = 256  # of a generated text, where the task does not set it; as lm-eval's own models
# Generation settings of transformers that tasks may set to the values at which they do nothing.
NEUTRAL_SETTINGS = MappingProxyType(
    {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
)

TokenizedPair = tuple[tuple[str, str], list[int], list[int]]  # texts, context ids, continuation ids


class MegatronZppLM(TemplateLM):
    """An opened model; `max_length` is the most tokens it sees at once (default: its positions).

    `open_model` opens the model that the harness names.
    """

    open_model = staticmethod(open_checkpoint)

    def __init__(
        self, model: TextModel, batch_size: int | str = 1, max_length: int | None = None
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise InputError(f"--batch_size {batch_size}: expected a whole number of 1 or more")
        self.max_length = model.context_length(max_length)
        self._model = model
        self._batch_size = int(batch_size)
        self._chat_tokenizer: Any = None  # that of transformers, once a prompt was made with it

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "MegatronZppLM":
        """Open the model that `--model_args` describe.

        They are `pretrained` (our --load), `max_length` (our --seq-length), and other fields of
        TextModelConfig and TokenizerConfig. Of `additional_config` only the batch size is used:
        each rank has its own device. Raises InputError for arguments that do not exist and a model
        that cannot be opened.
        """
        arguments = dict(arg_dict)
        arguments["load"] = arguments.pop("pretrained", None)
        batch_size = (additional_config or {}).get("batch_size") or 1
        max_length = arguments.pop("max_length", None)
        config = TextModelConfig(**_take_fields(TextModelConfig, arguments))
        tokenizer = TokenizerConfig(**_take_fields(TokenizerConfig, arguments))
        if arguments:
            raise InputError(f"megatron-zpp has no model argument {', '.join(sorted(arguments))}")
        config.check()
        tokenizer.check()
        model = open_text_model(config, tokenizer, Environment.read(), cls.open_model)
        return cls(model, batch_size, max_length)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "MegatronZppLM":
        """`create_from_arg_obj` of "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The id of the end of document."""
        return self._model.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without a context: begin of sentence, or end of document."""
        opening = self._model.tokenizer.opening
        return opening[0] if opening else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's cache of requests."""
        return f"{self._model.tokenizer.name}-{self._model.tokenizer.fingerprint}"

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes about the model into its results."""
        weights = self._model.model
        return {
            "model_num_parameters": weights.num_parameters(),
            "model_dtype": str(next(weights.parameters()).dtype),
            "max_length": self.max_length,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        """Token ids, after what the tokenizer puts before texts unless `add_special_tokens=False`.

        With a chat template the text itself spells all special tokens.
        """
        if self._chat_tokenizer is not None:
            return self._chat_tokenizer.encode(string, add_special_tokens=False)
        if add_special_tokens is False:
            return self._model.tokenizer.encode_part(string)
        return self._model.tokenizer.prompt(string)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the chat template, for the harness's results."""
        return self._open_chat_tokenizer().get_chat_template() if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages as a prompt; from here on all texts are taken for such prompts.

        Without `add_generation_prompt` the prompt ends with the text of the last message, which
        the model continues. Raises InputError for messages that the template refuses.
        """
        self._chat_tokenizer = self._open_chat_tokenizer()
        try:
            return self._chat_tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except (TemplateError, ValueError) as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, read in the harness's windows."""
        passages, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            new = [_passage(*make_disjoint_window(window)) for window in windows]
            passages += new
            counts.append(len(new))
        scores = self._model.score(passages, self._batch_size)
        sums = []
        for request, count in zip(requests, counts, strict=True):
            sums.append(sum(next(scores).log_probability for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that the model writes after each context."""
        ours = [self._request(*item.args, seed=seed) for seed, item in enumerate(requests)]
        prompt_lengths = [len(request.prompt) for request in ours]
        texts = [""] * len(ours)
        for batch in batches_by_length(prompt_lengths, self._batch_size):
            written = self._model.complete([ours[index] for index in batch])
            for index, text in zip(batch, written, strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: list[TokenizedPair], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would give it."""
        passages = []
        for (_, continuation), context_ids, ids in requests:
            if not 0 < len(ids) <= self.max_length:
                raise InputError(
                    f"{continuation[:60]!r} has {len(ids)} tokens, expected 1 to "
                    f"{self.max_length}, the most that the model sees at once"
                )
            context_ids = context_ids or [self.prefix_token_id]
            room = self.max_length + 1 - len(ids)
            passages.append(_passage(context_ids[-room:], ids))
        answers = []
        scores = self._model.score(passages, self._batch_size)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            answers.append((score.log_probability, score.is_greedy))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def _request(self, context: str, gen_kwargs: dict[str, Any], seed: int) -> Request:
        """Our form of a generation request; a long context loses its beginning.

        Raises InputError for settings that we do not have.
        """
        settings: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, MAX_NEW_TOKENS))
        max_new_tokens = settings.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room < 1:
            raise InputError(
                f"{max_new_tokens} new tokens leave no room for a prompt: the model sees "
                f"{self.max_length} tokens at once (--gen_kwargs max_gen_toks=...)"
            )
        temperature = settings.pop("temperature", 1.0)
        sampling = Sampling(
            temperature=float(temperature) if settings.pop("do_sample") else 0.0,
            top_k=int(settings.pop("top_k", 0)),
            top_p=float(settings.pop("top_p", 1.0)),
            seed=seed,
        )
        stop_texts = tuple(text for text in settings.pop("until") if text)
        unknown = [
            f"{name}={value}"
            for name, value in settings.items()
            if NEUTRAL_SETTINGS.get(name) != value
        ]
        if unknown:
            raise InputError(f"megatron-zpp cannot generate with {', '.join(unknown)}")
        return Request(
            prompt=tuple(self.tok_encode(context)[-room:]),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_texts=stop_texts,
        )

    def _open_chat_tokenizer(self) -> Any:
        """Return transformers' tokenizer of the model; raises InputError without a template."""
        if self._chat_tokenizer is not None:
            return self._chat_tokenizer
        path, tokenizer = self._model.tokenizer_path, None
        folder = path.parent if path is not None and path.is_file() else path
        if folder is not None and (folder / "tokenizer.json").is_file():
            transformers = load_package("transformers", "a chat template")
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if tokenizer is None or not tokenizer.chat_template:
            raise InputError(f"{self._model.name}: its tokenizer comes without a chat template")
        return tokenizer


def opened_by(open_model: OpenModel) -> type[MegatronZppLM]:
    """Return the class whose models are opened by a function."""
    return type("MegatronZppLM", (MegatronZppLM,), {"open_model": staticmethod(open_model)})


def _passage(context: Sequence[int], continuation: Sequence[int]) -> Passage:
    return Passage(ids=[*context, *continuation], first=len(context))


def _take_fields(section: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove from `arguments` those that are fields of a section, and return them."""
    names = [field.name for field in fields(section) if field.name in arguments]
    return {name: arguments.pop(name) for name in names}
