"""`megatron-zpp inspect`: prints what an indexed dataset holds."""

import sys

try:
    from megatron_zpp.commands.inspect_dataset import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/inspect_dataset.py"))
