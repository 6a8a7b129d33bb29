"""Hugging Face's GPT-2 and Llama models into checkpoints, and checkpoints into such folders.

    python tools/convert_hf.py --from-hf smollm2 --save checkpoints/smollm2
    python tools/convert_hf.py --load checkpoints/tuned --to-hf tuned --dtype bf16
    python tools/convert_hf.py --load checkpoints/lora --to-peft adapters

--from-hf takes a folder with config.json and safetensors files, or a .gguf file. One tensor is in
memory at a time (of a .gguf all of them). The tokenizer comes along in both directions. After an
import the flags with which pretrain_gpt.py goes on are printed. Of what LoRA has tuned, --to-hf
writes the model with the adapters merged, and --to-peft the adapters alone.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.checkpoint.safetensors_files import DTYPES, num_bytes  # noqa: E402
from megatron_zpp.models.convert import (  # noqa: E402
    export_adapters,
    export_model,
    flags,
    import_model,
)
from megatron_zpp.models.open_model import OpenedModel, open_model  # noqa: E402
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.settings.config import TokenizerConfig  # noqa: E402
from megatron_zpp.settings.flag import Section, flag  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = """\
usage: python tools/convert_hf.py --from-hf FOLDER|FILE.gguf --save CHECKPOINTS [flags]
       python tools/convert_hf.py --load CHECKPOINTS --to-hf FOLDER [flags]
       python tools/convert_hf.py --load CHECKPOINTS --to-peft FOLDER [flags]"""
PAIRS = (("from_hf", "save"), ("load", "to_hf"), ("load", "to_peft"))
STRAY = (  # flags that only one of the pairs has a use for
    ("make_vocab_size_divisible_by", "from_hf"), ("base", "load"), ("base_name", "to_peft"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """What to read and what to write; the tokenizer's flags replace the one that comes along"""

    from_hf: str | None = flag(None, "Hugging Face folder or .gguf file to read")
    save: str | None = flag(None, "folder of checkpoints to make of it")
    load: str | None = flag(
        None, "folder of checkpoints, one checkpoint's folder, or PEFT's folder, to read"
    )
    to_hf: str | None = flag(None, "Hugging Face folder to make of it, adapters merged")
    to_peft: str | None = flag(None, "folder of LoRA adapters to make of it, for PEFT")
    base: str | None = flag(
        None, "model that --load's adapters belong to (default: what fine-tuning began with)"
    )
    base_name: str | None = flag(
        None, "what PEFT shall open as the adapters' model (default: the folder of the base)"
    )
    dtype: str | None = flag(
        None, "type of the numbers that are written (default: as saved)", choices=tuple(DTYPES)
    )
    max_shard_size: str = flag("5GB", "most bytes in a file that --to-hf writes, as 500MiB")
    make_vocab_size_divisible_by: int | None = flag(
        None, "pad the vocabulary with rows of zeros (default: no rows are added)",
        minimum=1,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron_zpp").setLevel(logging.INFO)
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (ConvertConfig, TokenizerConfig)))
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
    opened = open_model(config.load, tokenizer, base=config.base)
    if config.to_peft is not None:
        output = Path(config.to_peft)
        paths = export_adapters(opened, output, config.dtype, config.base_name)
        layers = len(opened.adapters.layers)
        print(f"the adapters of {layers} layers of {opened.path} in {paths[-1].parent}")
        return
    most = num_bytes(config.max_shard_size, "--max-shard-size")
    paths = export_model(opened, Path(config.to_hf), config.dtype, most)
    print(f"{_described(opened)} of {opened.path} in {paths[-1]}")


def _described(opened: OpenedModel) -> str:
    facts = opened.weights.facts()
    numbers = sum(tensor.numel() for tensor in facts.values())
    return f"{len(facts)} tensors of {numbers:,} numbers"


def _configurations(argv: Sequence[str]) -> tuple[ConvertConfig, TokenizerConfig | None]:
    typed = read(argv, vocabulary((ConvertConfig, TokenizerConfig)))
    values = {name: assignment.value for name, assignment in typed.items()}
    own = {name: values.pop(name) for name in ConvertConfig.__dataclass_fields__.keys() & values}
    config = ConvertConfig(**own)
    config.check()
    given = {name for pair in PAIRS for name in pair if name in own}
    if given not in map(set, PAIRS):
        raise InputError(
            f"give --from-hf and --save, or --load and --to-hf, or --load and --to-peft\n{USAGE}"
        )
    for name, needed in STRAY:
        if name in own and needed not in own:
            flags = (f"--{one.replace('_', '-')}" for one in (name, needed))
            raise InputError("{} is for {}: leave it out".format(*flags))
    return config, TokenizerConfig(**values) if values else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
