"""`megatron-zpp inspect`: prints what an indexed dataset holds."""

import sys

from megatron_zpp.commands.inspect_dataset import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/inspect_dataset.py"))
