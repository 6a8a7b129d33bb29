"""Tokenizes text into Megatron's `.bin` and `.idx`.

    megatron-zpp preprocess --input books.jsonl --output-prefix books --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

writes books_text_document.bin and .idx, whose prefix `pretrain_gpt.py --data-path` takes. A
document is a line of a .jsonl, a row of a .parquet, or a .txt file; inputs may be compressed (.gz,
.zst), and a folder stands for all such files in it. Worker processes tokenize. The results are
written in the order of the input, whatever `--workers` is. Both files appear when all is done, or
not at all; after Ctrl-C or a crash the same command continues where it stopped.
"""

import logging
import signal
from collections.abc import Sequence

from megatron_zpp.commands.run_command import run_command
from megatron_zpp.preprocess import PreprocessConfig, preprocess
from megatron_zpp.preprocess.preprocess_config import IDLE
from megatron_zpp.settings.config import TokenizerConfig
from zeropp.ranks import use_one_rust_thread

USAGE = "usage: {program} --input FILE|FOLDER --output-prefix PREFIX --tokenizer-type TYPE [flags]"


def main(argv: Sequence[str], program: str = "megatron-zpp preprocess") -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    use_one_rust_thread()
    return run_command(
        argv,
        USAGE.format(program=program),
        (PreprocessConfig, TokenizerConfig),
        preprocess,
        interrupted="stopped; nothing was written",
        log_level=logging.INFO,
        idle=IDLE,
    )
