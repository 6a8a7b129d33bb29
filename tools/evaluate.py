"""`megatron-zpp evaluate`: measures how good a model is."""

import sys

from megatron_zpp.commands.evaluate import main
from zeropp.ranks.exit import exit_process

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "python tools/evaluate.py"))
