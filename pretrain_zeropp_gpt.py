"""The script that DeepSpeed's ZeRO++ tutorial names: the same program as pretrain_gpt.py."""

import sys

from megatron_zpp.commands.pretrain import main
from zeropp.ranks.process_group import exit_process

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "pretrain_zeropp_gpt.py"))
