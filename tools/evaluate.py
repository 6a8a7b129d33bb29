"""`megatron-zpp evaluate`: measures how good a model is."""

import sys

try:
    from megatron_zpp.commands.evaluate import main
    from zeropp.ranks.exit import exit_process
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "python tools/evaluate.py"))
