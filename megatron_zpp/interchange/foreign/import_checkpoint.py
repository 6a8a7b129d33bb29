"""Import a checkpoint of another program: its model, Adam's state, and where its run was."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.open_model import OpenedModel
from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.checkpoint.weight_source import AdamState
from megatron_zpp.interchange.conversion import require_no_model, training_flags
from megatron_zpp.interchange.converted_weights import ConvertedWeights
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import NameTable, name_table
from megatron_zpp.interchange.foreign.megatron_args import model_fields
from megatron_zpp.interchange.foreign.megatron_names import megatron_names
from megatron_zpp.interchange.foreign.rank_files import read_rank_files
from megatron_zpp.interchange.foreign.tensor_files import (
    NOT_ASKED_FOR,
    ForeignCheckpoint,
    NamedTensors,
)
from megatron_zpp.interchange.foreign.torch_dist import read_torch_dist
from megatron_zpp.interchange.foreign.torchtitan import (
    read_torchtitan,
    torchtitan_fields,
)
from megatron_zpp.interchange.foreign.universal_files import read_universal_files
from megatron_zpp.interchange.foreign.zero_files import read_model_files, read_zero_files
from megatron_zpp.interchange.open_model import with_padding
from megatron_zpp.settings.config import Config, ModelConfig, TokenizerConfig
from megatron_zpp.settings.gpt.shape_flags import ShapeFlags
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.factory import FIELDS, TOKENIZER_TYPES
from zeropp.checkpoint import FormatKind, find_format
from zeropp.errors import InputError

log = logging.getLogger("megatron_zpp")

READERS: Mapping[FormatKind, Callable[..., ForeignCheckpoint]] = MappingProxyType(
    {
        FormatKind.TORCH_DIST: read_torch_dist,
        FormatKind.MEGATRON_RANKS: read_rank_files,
        FormatKind.ZERO: read_zero_files,
        FormatKind.DEEPSPEED: read_model_files,
        FormatKind.UNIVERSAL: read_universal_files,
        FormatKind.SHARDS: read_torchtitan,
    }
)
# Where the optimizer's state is apart from the weights, so that they can be read alone.
APART = (
    FormatKind.TORCH_DIST,
    FormatKind.MEGATRON_RANKS,
    FormatKind.ZERO,
    FormatKind.UNIVERSAL,
)


@dataclass(frozen=True, kw_only=True)
class ImportedCheckpoint:
    """What was written: the model, and why Adam's state was left out, "" if it was not."""

    opened: OpenedModel
    iteration: int
    without_optimizer: str

    def training_flags(self, save: Path) -> list[str]:
        """Return the flags with which pretrain_gpt.py continues the run, in lines."""
        lines = training_flags(self.opened, save)
        if self.without_optimizer:
            return lines
        return [f"--load {save} --use-checkpoint-args", *lines[1:]]


def import_checkpoint(
    source: Path,
    save: Path,
    tokenizer_config: TokenizerConfig | None = None,
    vocab_multiple: int | None = None,
    shape_flags: ShapeFlags | None = None,
    *,
    load_optimizer: bool = True,
) -> ImportedCheckpoint:
    """Write the checkpoint in the folder `source` to the folder `save`, of the same iteration.

    Without `load_optimizer` it writes the weights alone. Raises InputError for a format that cannot
    be read, for damaged or incomplete files, for a model that our GPT cannot be, and if `save`
    holds checkpoints already.
    """
    require_no_model(save)
    path, kind = _format_of(source)
    with _surprises_as_input_errors(path):
        foreign = _read(path, kind, load_optimizer)
        model, table = _description(foreign, kind, shape_flags or ShapeFlags(), path)
    model.check()
    rows = _vocab_rows(foreign.weights, table)
    tokenizer_config = tokenizer_config or _saved_tokenizer(foreign.args, rows)
    tokenizer = build_tokenizer(tokenizer_config)
    model = with_padding(model, rows, tokenizer.vocab_size, vocab_multiple, path)
    padded_rows = model.padded_vocab_size(tokenizer.vocab_size)
    sizes = Sizes(model=model, vocab_rows=rows, padded_rows=padded_rows)
    weights = ConvertedWeights(foreign.weights, table, sizes)
    adam = None
    if foreign.moments:
        moments = {
            key: ConvertedWeights(tensors, table, sizes) for key, tensors in foreign.moments.items()
        }
        adam = AdamState(moments=moments, step=foreign.step)
    state = _state(foreign, model, tokenizer_config, tokenizer)
    written = checkpoint.save_weights(save, weights, state, adam)
    opened = OpenedModel(
        path=written,
        config=model,
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config,
        weights=weights,
    )
    return ImportedCheckpoint(
        opened=opened, iteration=foreign.iteration, without_optimizer=foreign.without_moments
    )


def _format_of(source: Path) -> tuple[Path, FormatKind]:
    place = find_format(source)
    if place is None:
        raise InputError(
            f"--from-checkpoint {source}: holds no checkpoint of Megatron-LM, DeepSpeed or "
            "torchtitan: name the folder of a run, or of one of its iterations"
        )
    path, found = place
    if found.kind not in READERS:
        advice = found.export or "import it with --from-hf"
        raise InputError(f"--from-checkpoint {source}: {path} is {found.name}: {advice}")
    return path, found.kind


def _read(path: Path, kind: FormatKind, load_optimizer: bool) -> ForeignCheckpoint:
    if load_optimizer:
        return READERS[kind](path)
    options = {"load_optimizer": False} if kind in APART else {}
    foreign = READERS[kind](path, **options)
    return replace(foreign, moments={}, without_moments=NOT_ASKED_FOR)


@contextmanager
def _surprises_as_input_errors(path: Path) -> Iterator[None]:
    """Raise an InputError for what content of other types than a program writes leads to."""
    try:
        yield
    except InputError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(
            f"{path}: its files are not laid out as those of its program "
            f"({type(error).__name__}: {error}); is it of a very old or new version?"
        ) from error


def _description(
    foreign: ForeignCheckpoint, kind: FormatKind, flags: ShapeFlags, path: Path
) -> tuple[ModelConfig, NameTable]:
    """Return the model's settings, and the names of its weights."""
    if kind is FormatKind.SHARDS:
        return ModelConfig(**torchtitan_fields(foreign.weights, flags)), name_table("torchtitan")
    typed = [
        f"--{name.replace('_', '-')}" for name, value in asdict(flags).items() if value is not None
    ]
    if typed:
        raise InputError(f"{', '.join(typed)}: {path} says itself what its model is: leave it out")
    if not foreign.args:
        raise InputError(f"{path}: has no arguments of Megatron, which say what the model is")
    model = ModelConfig(**model_fields(foreign.args, str(path)))
    return model, megatron_names(model)


def _vocab_rows(weights: NamedTensors, table: NameTable) -> int:
    embedding = weights.facts().get(table.embedding)
    if embedding is None:
        names = ", ".join(list(weights.facts())[:3]) or "none"
        raise InputError(
            f"{weights.location}: has no {table.embedding}, so it is not a GPT; its tensors are "
            f"{names} ..."
        )
    return embedding.shape[0]


def _saved_tokenizer(args: Mapping[str, Any], rows: int) -> TokenizerConfig:
    """Return the tokenizer that the arguments name, if its files are there."""
    name = args.get("tokenizer_type")
    names = TOKENIZER_TYPES.get(name, (None, ()))[1]
    values = {field: args.get(field) for field in FIELDS if field in names}
    if name != "NullTokenizer" and values:
        if all(value and Path(value).exists() for value in values.values()):
            return TokenizerConfig(tokenizer_type=name, **values)
    if name not in (None, "NullTokenizer"):
        log.warning(
            "its tokenizer, %s, is not here: token ids are numbers (NullTokenizer); give "
            "--tokenizer-type and its files to name it",
            name,
        )
    return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=rows)


def _state(
    foreign: ForeignCheckpoint,
    model: ModelConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: Tokenizer,
) -> TrainingState:
    config = Config(model=model, tokenizer=tokenizer_config)
    samples = int(foreign.args.get("consumed_train_samples") or 0)
    return TrainingState(
        iteration=foreign.iteration,
        consumed_samples=samples,
        consumed_tokens=samples * model.seq_length,
        consumed_valid_samples=int(foreign.args.get("consumed_valid_samples") or 0),
        seed=int(foreign.args.get("seed") or config.training.seed),
        world_size=1,
        stage=0,
        tokenizer=tokenizer.fingerprint,
        schedule={"scheduled_samples": samples},
        architecture=architecture(model, tokenizer.vocab_size),
        configuration=config.to_dict(),
    )
