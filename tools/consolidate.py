"""`megatron-zpp consolidate`: writes a checkpoint's weights to one safetensors file."""

import sys

from megatron_zpp.commands.consolidate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/consolidate.py"))
