"""`megatron-zpp generate`: text from a model."""

import sys

try:
    from megatron_zpp.commands.generate_text import main
    from zeropp.ranks.exit import exit_process
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    exit_process(main(sys.argv[1:], "python tools/generate.py"))
