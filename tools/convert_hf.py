"""Hugging Face's GPT-2 and Llama models into checkpoints, and checkpoints into such folders.

    python tools/convert_hf.py --from-hf smollm2 --save checkpoints/smollm2
    python tools/convert_hf.py --load checkpoints/tuned --to-hf tuned --dtype bf16

--from-hf takes a folder with config.json and safetensors files, or a .gguf file. One tensor is in
memory at a time (of a .gguf all of them). The tokenizer comes along in both directions. After an
import the flags with which pretrain_gpt.py goes on are printed.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.config import TokenizerConfig  # noqa: E402
from megatron_zpp.config.flag import Section, flag  # noqa: E402
from megatron_zpp.convert import export_model, flags, import_model  # noqa: E402
from megatron_zpp.open_model import OpenedModel, open_model  # noqa: E402
from megatron_zpp.safetensors_files import DTYPES, num_bytes  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = """\
usage: python tools/convert_hf.py --from-hf FOLDER|FILE.gguf --save CHECKPOINTS [flags]
       python tools/convert_hf.py --load CHECKPOINTS --to-hf FOLDER [flags]"""
IN, OUT = ("from_hf", "save"), ("load", "to_hf")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """What to read and what to write; the tokenizer's flags replace the one that comes along"""

    from_hf: str | None = flag(None, "Hugging Face folder or .gguf file to read")
    save: str | None = flag(None, "folder of checkpoints to make of it")
    load: str | None = flag(None, "folder of checkpoints, or one checkpoint's folder, to read")
    to_hf: str | None = flag(None, "Hugging Face folder to make of it")
    dtype: str | None = flag(
        None, "type of the numbers that --to-hf writes (default: as saved)", choices=tuple(DTYPES)
    )
    max_shard_size: str = flag("5GB", "most bytes in a file that --to-hf writes, as 500MiB")
    make_vocab_size_divisible_by: int | None = flag(
        None, "pad the vocabulary with rows of zeros (default: no rows are added)", kind=int,
        minimum=1,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron_zpp").setLevel(logging.INFO)
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (ConvertConfig, TokenizerConfig), ()))
        return 0
    try:
        convert(*_configurations(argv))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped; the output is not complete", file=sys.stderr)
        return 130
    return 0


def convert(config: ConvertConfig, tokenizer: TokenizerConfig | None) -> None:
    """Read and write as asked, and say what was made."""
    if config.from_hf is not None:
        source, save = Path(config.from_hf), Path(config.save)
        opened = import_model(source, save, tokenizer, config.make_vocab_size_divisible_by)
        print(f"{_described(opened)} in {opened.path}")
        print("to go on with it: pretrain_gpt.py\n  " + "\n  ".join(flags(opened, save)))
        return
    opened = open_model(config.load, tokenizer)
    most = num_bytes(config.max_shard_size, "--max-shard-size")
    paths = export_model(opened, Path(config.to_hf), config.dtype, most)
    print(f"{_described(opened)} of {opened.path} in {paths[-1]}")


def _described(opened: OpenedModel) -> str:
    facts = opened.weights.facts()
    numbers = sum(tensor.numel() for tensor in facts.values())
    return f"{len(facts)} tensors of {numbers:,} numbers"


def _configurations(argv: Sequence[str]) -> tuple[ConvertConfig, TokenizerConfig | None]:
    typed = read(argv, vocabulary((ConvertConfig, TokenizerConfig), ()))
    values = {name: assignment.value for name, assignment in typed.items()}
    own = {name: values.pop(name) for name in ConvertConfig.__dataclass_fields__.keys() & values}
    config = ConvertConfig(**own)
    config.check()
    given = {pair for pair in (IN, OUT) if all(name in own for name in pair)}
    stray = [name for name in IN + OUT if name in own and not any(name in p for p in given)]
    if len(given) != 1 or stray:
        raise InputError(f"give --from-hf and --save, or --load and --to-hf\n{USAGE}")
    if config.load is not None and config.make_vocab_size_divisible_by is not None:
        raise InputError("--make-vocab-size-divisible-by is for --from-hf: leave it out")
    return config, TokenizerConfig(**values) if values else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
