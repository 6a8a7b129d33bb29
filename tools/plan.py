"""`megatron-zpp plan`: says which configuration of a run fits on a cluster and is fastest."""

import sys

from megatron_zpp.commands.plan import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/plan.py"))
