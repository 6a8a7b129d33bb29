"""The command `zeropp`: starts the ranks of one machine, or of the machines in a hostfile."""

from zeropp.ranks.launcher.command import main

__all__ = ["main"]
