"""What `--help` prints for a training run: what one needs first, all flags, or a section."""

import difflib
from collections.abc import Sequence
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.command_line import HELP, flag_help, help_text, vocabulary
from megatron_zpp.settings.config import SECTIONS
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.settings.gpt.model import ModelFlags
from megatron_zpp.settings.json_flags import ZeroFlags
from zeropp.errors import InputError
from zeropp.settings import declared

USAGE = """\
usage: {program} [FLAGS]

Trains a GPT with ZeRO stages 0 to 3; torchrun or zeropp starts it on several ranks. The flags are
Megatron's, and --deepspeed-config names a JSON file with DeepSpeed's keys. Everything has a
default, the data too. The words of a flag may be separated by - or _."""
FIRST = (
    "num-layers", "hidden-size", "num-attention-heads", "seq-length",
    "data-path", "split", "tokenizer-type", "tokenizer-model",
    "micro-batch-size", "global-batch-size", "train-iters", "lr", "lr-warmup-iters", "bf16",
    "deepspeed-config", "zero-stage",
    "save", "load", "save-interval", "tensorboard-dir",
)  # fmt: skip
ALL, NO_EFFECT = "all", "no-effect"
_PARTS = dict(declared("TOPICS", CAPABILITIES))  # of sections, with a topic of their own
APART = tuple(_PARTS.values())
TOPICS = MappingProxyType({**SECTIONS, **_PARTS, "zero": ZeroFlags, "megatron": ModelFlags})


def run_help(argv: Sequence[str], program: str) -> str:
    """Return the help of `program` on what follows `--help`.

    Raises InputError for a word that is not `all`, `no-effect` or a section.
    """
    after = argv[next(place for place, word in enumerate(argv) if word in HELP) + 1 :]
    topic = after[0] if after and not after[0].startswith("-") else ""
    usage = USAGE.format(program=program)
    if topic == ALL:
        return help_text(usage, TOPICS.values(), flags_without_effect(), APART)
    if topic == NO_EFFECT:
        return help_text(usage, (), flags_without_effect())
    if topic in TOPICS:
        return help_text(usage, [TOPICS[topic]], apart=APART)
    topics = [ALL, *TOPICS, NO_EFFECT]
    if topic:
        close = difflib.get_close_matches(topic, topics, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"--help {topic}: {hint}expected one of {', '.join(topics)}")
    known = vocabulary(TOPICS.values())
    first = [flag_help(known[name].flag) for name in FIRST]
    about = {name: section.__doc__.strip().splitlines()[0] for name, section in TOPICS.items()}
    about[NO_EFFECT] = "Flags that are accepted and have no effect."
    more = f"More flags:  {program} --help all, or --help SECTION, where SECTION is"
    parts = (
        [usage],
        ["The flags that one needs first:", *first],
        [more, *(f"  {name:<12}{text}" for name, text in about.items())],
    )
    return "\n\n".join("\n".join(lines) for lines in parts)
