"""`megatron-zpp preprocess`, under Megatron's name: tokenizes text."""

import sys

try:
    from megatron_zpp.commands.preprocess_data import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/preprocess_data.py"))
