"""`megatron-zpp dump-samples`: writes or prints the samples of a run."""

import sys

try:
    from megatron_zpp.commands.dump_samples import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/dump_samples.py"))
