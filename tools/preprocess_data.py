"""Text into Megatron's `.bin` and `.idx`: a document is a line of a .jsonl, or a .txt file.

    python tools/preprocess_data.py --input books.jsonl --output-prefix books --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

makes books_text_document.bin and .idx, whose prefix `pretrain_gpt.py --data-path` takes. This
process reads and writes, workers tokenize; results are written in the order of the input, so they
do not depend on --workers. Both files appear when all is done, or not at all. After Ctrl-C or a
crash the same command goes on from where it was. Lines and texts may be compressed (.gz, .zst), the
rows of a .parquet are documents as well, and a folder means all such files in it.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from megatron_zpp.preprocess import PreprocessConfig, preprocess
from megatron_zpp.preprocess.run import Stopped
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary
from megatron_zpp.settings.config import TokenizerConfig
from zeropp.errors import InputError
from zeropp.ranks.topology import one_rust_thread

__all__ = ["PreprocessConfig", "main", "preprocess"]
USAGE = (
    "usage: python tools/preprocess_data.py --input FILE|FOLDER --output-prefix PREFIX "
    "--tokenizer-type TYPE [flags]"
)


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, _stop)
    one_rust_thread()
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (PreprocessConfig, TokenizerConfig)))
        return 0
    try:
        preprocess(*_configurations(argv))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Stopped, KeyboardInterrupt) as stop:
        print(f"error: {stop or 'stopped; nothing was written'}", file=sys.stderr)
        return 130
    return 0


def _configurations(argv: Sequence[str]) -> tuple[PreprocessConfig, TokenizerConfig]:
    typed = read(argv, vocabulary((PreprocessConfig, TokenizerConfig)))
    for assignment in typed.values():
        if reason := assignment.flag.why_ignored:
            logging.info("%s has no effect here: %s", assignment, reason)
    values = {name: assignment.value for name, assignment in typed.items()}
    own = {name: values.pop(name) for name in PreprocessConfig.__dataclass_fields__.keys() & values}
    return PreprocessConfig(**own), TokenizerConfig(**values)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
