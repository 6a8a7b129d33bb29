"""`megatron-zpp pretrain`, under Megatron's name: pretrains a GPT; --help lists the flags."""

import sys

try:
    from megatron_zpp.commands.pretrain import main
    from zeropp.ranks.exit import exit_process
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

ZEROPP = {  # read by `zeropp` before it starts the ranks
    "check": "megatron_zpp.commands.pretrain:check_pretrain",
    "imports": ["megatron_zpp.train.pretrain"],
}

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "pretrain_gpt.py"))
