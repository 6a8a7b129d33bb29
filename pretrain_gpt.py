"""Pretrain a GPT: `python pretrain_gpt.py --help` lists the flags."""

import sys

from megatron_zpp.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
