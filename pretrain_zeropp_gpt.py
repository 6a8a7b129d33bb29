"""The script the ZeRO++ tutorial names: the same program as pretrain_gpt.py."""

import sys

from megatron_zpp.main import main
from zeropp.process_group import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
