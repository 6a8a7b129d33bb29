"""`megatron-zpp plan`: says which configuration of a run fits on a cluster and is fastest."""

import sys

try:
    from megatron_zpp.commands.plan import main
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: type `make setup`, and run this by .venv/bin/python")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/plan.py"))
