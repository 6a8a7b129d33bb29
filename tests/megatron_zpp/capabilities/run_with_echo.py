"""Runs `pretrain_gpt.py` with one file more among the capabilities."""

import sys
from importlib import import_module
from pathlib import Path

import megatron_zpp.capabilities

sys.dont_write_bytecode = True
FOLDER = str(Path(__file__).parent / "one_more")
megatron_zpp.capabilities.__path__.append(FOLDER)

if __name__ == "__main__":
    sys.exit(import_module("megatron_zpp.commands.pretrain").main(sys.argv[1:], "pretrain_gpt.py"))
