"""Text to Megatron's `.bin` and `.idx`: read here, tokenized by worker processes, written in order.

source -> chunks of documents -> pool of encode -> partial datasets and a journal -> the two files
"""

from megatron_zpp.preprocess.flags import PreprocessConfig
from megatron_zpp.preprocess.run import preprocess

__all__ = ["PreprocessConfig", "preprocess"]
