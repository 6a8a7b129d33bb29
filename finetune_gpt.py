"""`megatron-zpp finetune`: fine-tunes a pretrained model; --help lists the flags."""

import sys

try:
    from megatron_zpp.commands.finetune import main
    from zeropp.ranks.exit import exit_process
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

ZEROPP = {  # read by `zeropp` before it starts the ranks
    "check": "megatron_zpp.commands.pretrain:check_finetune",
    "imports": ["megatron_zpp.train.pretrain"],
}

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "finetune_gpt.py"))
