"""Convert text into Megatron's `.bin` and `.idx` files.

input files -> chunks of documents -> worker processes that tokenize -> partial output with a
journal -> the two files of each dataset
"""

from megatron_zpp.preprocess.pipeline import preprocess
from megatron_zpp.preprocess.preprocess_config import PreprocessConfig

__all__ = ["PreprocessConfig", "preprocess"]
