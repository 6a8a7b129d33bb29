"""`megatron-zpp COMMAND [flags]`, also `python -m megatron_zpp.commands COMMAND [flags]`.

The module of a command is imported when the command is chosen, so that commands that only handle
text start without importing torch.
"""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from megatron_zpp.settings.command_line import HELP, typed_words
from zeropp import __version__
from zeropp.ranks import exit_process

ZEROPP = {  # read by `zeropp --module` before it starts the ranks
    "check": "megatron_zpp.commands.pretrain:check_command",
    "imports": ["megatron_zpp.train.pretrain"],
}
PROGRAM = "megatron-zpp"
USAGE_ERROR = 2


@dataclass(frozen=True)
class Command:
    """A command: the file whose `main(argv, program)` runs it, and its line in the help.

    `joins_ranks` commands may be started on several ranks by torchrun or zeropp.
    """

    file: str
    summary: str
    joins_ranks: bool = False

    @property
    def module(self) -> str:
        return f"megatron_zpp.commands.{self.file}"


COMMANDS = MappingProxyType(
    {
        "pretrain": Command("pretrain", "pretrain a GPT", True),
        "finetune": Command("finetune", "fine-tune a pretrained model, also with LoRA", True),
        "generate": Command("generate_text", "write text with a model", True),
        "evaluate": Command("evaluate", "measure how good a model is", True),
        "plan": Command("plan", "find what fits on a cluster and is fastest"),
        "report": Command("report", "draw the report of a run again"),
        "preprocess": Command("preprocess_data", "tokenize text into an indexed dataset"),
        "inspect": Command("inspect_dataset", "print what an indexed dataset holds"),
        "merge": Command("merge_datasets", "merge indexed datasets into one"),
        "dump-samples": Command("dump_samples", "write or print the samples of a run"),
        "convert": Command("convert_hf", "convert models from and to Hugging Face's format"),
        "consolidate": Command("consolidate", "write a checkpoint's weights to one file"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: this process's arguments) names.

    Returns the exit status, except for commands that join ranks: those end the process.
    """
    words = typed_words(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        print(help_text())
        return 0 if words else USAGE_ERROR
    name = words[0]
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        return USAGE_ERROR
    command = COMMANDS[name]
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing.startswith("megatron_zpp."):
            raise
        print(f"error: {PROGRAM} {name} needs {missing}, which is not installed", file=sys.stderr)
        return USAGE_ERROR
    status = module.main(words[1:], f"{PROGRAM} {name}")
    if command.joins_ranks:
        exit_process(status)
    return status


def help_text() -> str:
    """The list of commands, and how to start one on several ranks."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    on_ranks = [name for name, command in COMMANDS.items() if command.joins_ranks]
    ranks = ", ".join(on_ranks[:-1]) + f" or {on_ranks[-1]}"
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [flags]",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help lists the flags of a command,",
            f"{PROGRAM} --version prints the version.",
            f"To run {ranks} on several ranks:",
            "  zeropp --num_ranks N --module megatron_zpp.commands COMMAND [flags]",
            "  torchrun --nproc-per-node N -m megatron_zpp.commands COMMAND [flags]",
        ]
    )


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(COMMANDS)}"
    return f"unknown command {name}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
