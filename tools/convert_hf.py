"""`megatron-zpp convert`: converts models from and to Hugging Face's format."""

import sys

from megatron_zpp.commands.convert_hf import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python tools/convert_hf.py"))
