"""The names of Muon's choices, without the libraries that carry them out."""

COEFFICIENT_TYPES = ("simple", "quintic", "polar_express")
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
NODE, RANK, WHOLE = BLOCKS = ("node", "rank", "whole")
BLOCKWISE, DUPLICATED, DISTRIBUTED = TP_MODES = ("blockwise", "duplicated", "distributed")
