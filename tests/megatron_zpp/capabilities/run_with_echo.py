"""Runs `pretrain_gpt.py` with one file more among the capabilities."""

import sys
from importlib import import_module
from pathlib import Path

from zeropp.exports import modules_of

sys.dont_write_bytecode = True
modules_of.cache_clear()  # what is forked has read all settings already
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_zpp"]:
    del sys.modules[name]
FOLDER = str(Path(__file__).parent / "one_more")
import_module("megatron_zpp.capabilities").__path__.append(FOLDER)

if __name__ == "__main__":
    sys.exit(import_module("megatron_zpp.commands.pretrain").main(sys.argv[1:], "pretrain_gpt.py"))
