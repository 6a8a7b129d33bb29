"""--use-checkpoint-args: the model's settings are taken from the checkpoint in --load."""

import logging
from dataclasses import replace

from megatron_zpp.checkpoint.checkpoint import choose
from megatron_zpp.checkpoint.training_state import NOT_ARCHITECTURE, read_state, with_tuples
from megatron_zpp.settings.config import Config, ModelConfig
from zeropp.errors import InputError

log = logging.getLogger("megatron_zpp")


def with_checkpoint_model(config: Config) -> Config:
    """Return `config` with the architecture of the newest checkpoint in `--load`.

    All ranks call it. Raises InputError if there is no checkpoint.
    """
    options = config.checkpoint
    path = choose(
        options.load, verify=not options.no_verify_checkpoint, iteration=options.ckpt_step
    )
    if path is None:
        raise no_checkpoint_error(config.checkpoint.load, "--use-checkpoint-args")
    defaults = vars(ModelConfig())
    settings = {name: defaults[name] for name in defaults if name not in NOT_ARCHITECTURE}
    settings |= with_tuples(read_state(path).architecture)
    settings.pop("vocab_size")
    num_positions = settings.pop("num_positions", None)
    if num_positions is not None:
        settings["max_position_embeddings"] = num_positions
    for name, value in settings.items():
        own = getattr(config.model, name)
        if value != own:
            given = config.given.get(name) or (own != defaults[name] and f"{name} = {own}")
            but = f", and {given} has no effect" if given else ""
            log.info("--use-checkpoint-args: %s is %s%s", name, value, but)
    config = replace(config, model=replace(config.model, **settings))
    config.model.check()
    return config


def no_checkpoint_error(folder: str, flag: str) -> InputError:
    """The error for a `flag` that needs a checkpoint where `--load` has none."""
    return InputError(
        f"--load {folder} holds no checkpoint, and {flag} needs one: name the folder that --save "
        f"named, or leave {flag} out"
    )
