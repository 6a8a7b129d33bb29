"""Converts models of other programs to checkpoints of ours, and these to their formats.

    megatron-zpp convert --from-hf smollm2 --save checkpoints/smollm2
    megatron-zpp convert --from-checkpoint megatron/run --save checkpoints/run
    megatron-zpp convert --load checkpoints/tuned --to-hf tuned --dtype bf16
    megatron-zpp convert --load checkpoints/lora --to-peft adapters
    megatron-zpp convert --load checkpoints/tuned --to-megatron megatron/tuned

`--from-hf` takes a folder with config.json and safetensors files, or a .gguf file. Memory holds one
tensor at a time (all of them for a .gguf). `--from-checkpoint` takes a checkpoint of Megatron-LM,
Megatron-DeepSpeed or torchtitan, recognised by its files, with Adam's state and the iteration where
it has them. A Hugging Face model's tokenizer is copied in both directions. After an import the
command prints the flags with which pretrain_gpt.py continues. For a model that was tuned with LoRA,
`--to-hf` writes the model with the adapters merged into it, `--to-peft` the adapters.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from megatron_zpp.checkpoint.open_model import OpenedModel
from megatron_zpp.checkpoint.safetensors_files import DTYPES, num_bytes
from megatron_zpp.commands.run_command import load_part, run_command
from megatron_zpp.interchange.conversion import (
    export_adapters,
    export_model,
    import_model,
    training_flags,
)
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.settings.gpt.shape_flags import ShapeFlags
from zeropp.errors import InputError

USAGE = """\
usage: {program} --from-hf FOLDER|FILE.gguf --save CHECKPOINTS [flags]
       {program} --from-checkpoint FOLDER --save CHECKPOINTS [flags]
       {program} --load CHECKPOINTS --to-hf FOLDER [flags]
       {program} --load CHECKPOINTS --to-peft FOLDER [flags]
       {program} --load CHECKPOINTS --to-megatron FOLDER [flags]"""
FOREIGN = "megatron_zpp.interchange.foreign"  # imported where it is needed: it may be left out
SOURCE_AND_TARGET = (
    ("from_hf", "save"),
    ("from_checkpoint", "save"),
    ("load", "to_hf"),
    ("load", "to_peft"),
    ("load", "to_megatron"),
)
NEEDS = MappingProxyType(  # flags that have an effect only beside another one
    {
        "make_vocab_size_divisible_by": ("from_hf", "from_checkpoint"),
        "no_load_optim": ("from_checkpoint",),
        "base": ("load",),
        "base_name": ("to_peft",),
    }
)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """What to read and what to write; tokenizer flags replace the model's own tokenizer"""

    from_hf: str | None = flag(None, "Hugging Face folder or .gguf file to read")
    from_checkpoint: str | None = flag(
        None, "checkpoint of Megatron-LM, DeepSpeed or torchtitan to read, or its run's folder"
    )
    no_load_optim: bool | None = flag(
        None, "import the weights of --from-checkpoint alone, without Adam's state"
    )
    save: str | None = flag(None, "folder of checkpoints to write")
    load: str | None = flag(
        None, "folder of checkpoints, one checkpoint's folder, or PEFT's folder, to read"
    )
    to_hf: str | None = flag(None, "Hugging Face folder to write, LoRA adapters merged")
    to_peft: str | None = flag(None, "folder of LoRA adapters to write, for PEFT")
    to_megatron: str | None = flag(
        None, "folder for Megatron-LM to write, a release in its torch_dist format"
    )
    base: str | None = flag(
        None, "model that the adapters of --load belong to (default: the one that was fine-tuned)"
    )
    base_name: str | None = flag(
        None, "the model that PEFT loads below the adapters (default: the folder of the base)"
    )
    dtype: str | None = flag(
        None, "dtype of the written tensors (default: as saved)", choices=tuple(DTYPES)
    )
    max_shard_size: str = flag("5GB", "maximum size of a file of --to-hf, for example 500MiB")
    make_vocab_size_divisible_by: int | None = flag(
        None, "pad the vocabulary with rows of zeros (default: no rows are added)", minimum=1
    )

    def check(self) -> None:
        """Raise InputError for a value out of range, and for flags that do not fit together."""
        super().check()
        typed = {name for name, value in asdict(self).items() if value is not None}
        paths = {name for pair in SOURCE_AND_TARGET for name in pair if name in typed}
        if paths not in map(set, SOURCE_AND_TARGET):
            raise InputError(
                "give --from-hf and --save, or --load and --to-hf, or --load and --to-peft, or "
                "--from-checkpoint and --save, or --load and --to-megatron; see --help"
            )
        for name, needed in NEEDS.items():
            if name in typed and not typed & set(needed):
                flags = " and ".join(map(_dashed, needed))
                raise InputError(f"{_dashed(name)} is for {flags}: leave it out")


def main(argv: Sequence[str], program: str = "megatron-zpp convert") -> int:
    """Run the command; return the exit status."""
    logging.getLogger("megatron_zpp").setLevel(logging.INFO)
    return run_command(
        argv,
        USAGE.format(program=program),
        (ConvertConfig, TokenizerConfig, ShapeFlags),
        convert,
        interrupted="stopped; the output is not complete",
    )


def convert(
    config: ConvertConfig, tokenizer_config: TokenizerConfig, shape_flags: ShapeFlags
) -> None:
    """Read and write as `config` says, and print what was written.

    Raises InputError if the source cannot be read or the target cannot express the model.
    """
    tokenizer = tokenizer_config if tokenizer_config != TokenizerConfig() else None
    if config.from_hf is not None:
        source, save = Path(config.from_hf), Path(config.save)
        opened = import_model(source, save, tokenizer, config.make_vocab_size_divisible_by)
        print(f"{_size(opened)} in {opened.path}")
        lines = ["to continue with it: pretrain_gpt.py", *training_flags(opened, save)]
        print("\n  ".join(lines))
        return
    if config.from_checkpoint is not None:
        _import_checkpoint(config, tokenizer, shape_flags)
        return
    if shape_flags != ShapeFlags():
        raise InputError("flags that describe a model are for --from-checkpoint: leave them out")
    opened = open_model(config.load, tokenizer, base=config.base)
    if config.to_peft is not None:
        output = Path(config.to_peft)
        paths = export_adapters(opened, output, config.dtype, config.base_name)
        layers = len(opened.added.layers)
        print(f"the adapters of {layers} layers of {opened.path} in {paths[-1].parent}")
        return
    if config.to_megatron is not None:
        part = load_part(FOREIGN, "--to-megatron", "export_torch_dist")
        folder = part.export_torch_dist(opened, Path(config.to_megatron), config.dtype)
        print(f"{_size(opened)} of {opened.path} in {folder}, for Megatron-LM's --load")
        return
    max_bytes = num_bytes(config.max_shard_size, "--max-shard-size")
    paths, has_tokenizer = export_model(opened, Path(config.to_hf), config.dtype, max_bytes)
    name = opened.tokenizer.name
    without = f", without a tokenizer: Hugging Face's libraries cannot make the ids of {name}"
    print(f"{_size(opened)} of {opened.path} in {paths[-1]}{'' if has_tokenizer else without}")


def _import_checkpoint(
    config: ConvertConfig, tokenizer: TokenizerConfig | None, shape_flags: ShapeFlags
) -> None:
    source, save = Path(config.from_checkpoint), Path(config.save)
    multiple = config.make_vocab_size_divisible_by
    part = load_part(FOREIGN, "--from-checkpoint", "import_checkpoint")
    imported = part.import_checkpoint(
        source, save, tokenizer, multiple, shape_flags, load_optimizer=not config.no_load_optim
    )
    adam = imported.without_optimizer
    print(
        f"{_size(imported.opened)} of iteration {imported.iteration} in {imported.opened.path}\n"
        + (f"without Adam's state: {adam}" if adam else "with Adam's state")
    )
    lines = ["to continue with it: pretrain_gpt.py", *imported.training_flags(save)]
    print("\n  ".join(lines))


def _size(opened: OpenedModel) -> str:
    tensors = opened.weights.facts().values()
    numbers = sum(tensor.numel() for tensor in tensors)
    return f"{len(tensors)} tensors of {numbers:,} numbers"


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
