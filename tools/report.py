"""`megatron-zpp report`: draws the report of a run again."""

import sys

from megatron_zpp.commands.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/report.py"))
