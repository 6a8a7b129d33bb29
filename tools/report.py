"""`megatron-zpp report`: draws the report of a run again."""

import sys

try:
    from megatron_zpp.commands.report import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/report.py"))
