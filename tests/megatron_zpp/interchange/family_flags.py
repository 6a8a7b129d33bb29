"""The flags that make our GPT one of the models in `foreign_models.py`, but for its sizes."""

from tests.megatron_zpp.settings.tables import rows


def flags_of(kind: str) -> dict[str, str]:
    return {each["name"]: f"{each['flags']} " for each in rows("family_flags.tsv", kind=kind)}


FLAGS, FLAGS_OF_DENSE, FLAGS_OF_MIXTURES = map(flags_of, ("family", "dense", "mixture"))
# Those of dense families that no family above has, some of them at once. Weights are large, so that
# gradients of a few numbers count in the norm of all.
FLAGS_OF_PIECES = flags_of("pieces")
