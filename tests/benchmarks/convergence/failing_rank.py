"""A rank that fails, in place of benchmarks.convergence.convergence_rank."""

import sys

if __name__ == "__main__":
    sys.exit("error: no text")
