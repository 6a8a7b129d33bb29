"""The training run from the command line to its end: build, loop, step, evaluate, stop, resume."""
