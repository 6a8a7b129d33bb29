"""The commands of `megatron-zpp`, one file each; the scripts in `tools/` call them."""
