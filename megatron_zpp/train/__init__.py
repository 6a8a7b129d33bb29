"""A training run from its command line to its end.

Read in this order: `pretrain` (the program), `inputs` and `build` (before the first iteration),
`run` (what was built), `loop`, `step`, `pending_iteration`, `evaluate`, `stop`, `resume`.
"""
