"""The state of Megatron's distributed optimizer, which lies in buckets of parameters."""
