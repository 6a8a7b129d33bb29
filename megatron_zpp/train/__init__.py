"""A training run from its command line to its end.

Read in this order: `pretrain` (the program), `inputs` and `build` (before the first iteration),
`run` (what was built), `loop`, `trainer`, `pending_iteration`, `stop`, `resume`.
"""
