"""`megatron-zpp preprocess`, under Megatron's name: tokenizes text."""

import sys

from megatron_zpp.commands.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/preprocess_data.py"))
