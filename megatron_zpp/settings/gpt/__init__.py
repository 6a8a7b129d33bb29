"""The settings of the GPT: its shape and numerics, and the adapters beside its weights."""
