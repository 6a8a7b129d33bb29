"""`megatron-zpp dump-samples`: writes or prints the samples of a run."""

import sys

from megatron_zpp.commands.dump_samples import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/dump_samples.py"))
