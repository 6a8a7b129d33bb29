"""`megatron-zpp merge`, under Megatron's name: merges indexed datasets into one."""

import sys

try:
    from megatron_zpp.commands.merge_datasets import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/merge_datasets.py"))
