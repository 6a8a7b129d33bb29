"""`megatron-zpp convert`: converts models from and to Hugging Face's format."""

import sys

try:
    from megatron_zpp.commands.convert_hf import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/convert_hf.py"))
