"""The script the ZeRO++ tutorial names: the same program as pretrain_gpt.py."""

import sys

from megatron_zpp.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
