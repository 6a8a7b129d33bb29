"""`megatron-zpp pretrain`, under Megatron's name: pretrains a GPT; --help lists the flags."""

import sys

from megatron_zpp.commands.pretrain import main
from zeropp.ranks.process_group import exit_process

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "pretrain_gpt.py"))
