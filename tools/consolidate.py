"""`megatron-zpp consolidate`: writes a checkpoint's weights to one safetensors file."""

import sys

try:
    from megatron_zpp.commands.consolidate import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/consolidate.py"))
