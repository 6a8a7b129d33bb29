"""`megatron-zpp generate`: text from a model."""

import sys

from megatron_zpp.commands.generate_text import main
from zeropp.ranks.exit import exit_process

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "python tools/generate.py"))
