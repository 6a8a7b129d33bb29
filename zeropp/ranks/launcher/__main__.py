"""`python -m zeropp.ranks.launcher` is the command `zeropp`."""

import sys

from zeropp.ranks.launcher.command import main

if __name__ == "__main__":
    sys.exit(main())
