"""The commands of `megatron-zpp`, one file each; the scripts of tools/ call the same functions."""
