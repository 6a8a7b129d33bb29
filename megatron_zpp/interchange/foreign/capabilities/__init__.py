"""What capabilities add to checkpoints of other programs: found by listing, no reader names them.

A module may have tuples of functions: READS of the fields that arguments give, WRITES of arguments,
MISSING, settings that Megatron-LM lacks; LAYERS, the kinds of a model's layers; NAMES of a layer's
weight beside its own; STATES of a layer's MLP; JOINS of tensors. PATTERNS are names of arguments
that differ from layer to layer.
"""
