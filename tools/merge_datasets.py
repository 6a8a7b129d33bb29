"""`megatron-zpp merge`, under Megatron's name: merges indexed datasets into one."""

import sys

from megatron_zpp.commands.merge_datasets import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/merge_datasets.py"))
