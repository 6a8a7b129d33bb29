"""The flags that DeepSpeed adds to a program's own."""

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to the parser, and return it.

    `zeropp.initialize(args=...)` reads the path that `--deepspeed_config` gives. `--deepspeed` is
    for the program: nothing here reads it.

    Args:
        parser: The program's parser.

    Returns:
        The same parser.

    Example:
        ```python
        parser = deepspeed.add_config_arguments(ArgumentParser())
        args = parser.parse_args(["--deepspeed_config", "ds_config.json"])
        ```
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed's interface")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser
