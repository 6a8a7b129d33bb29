"""`megatron-zpp finetune`: fine-tunes a pretrained model; --help lists the flags."""

import sys

from megatron_zpp.commands.finetune import main
from zeropp.ranks.process_group import exit_process

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "finetune_gpt.py"))
