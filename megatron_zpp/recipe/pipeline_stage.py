"""A stage of a pipeline: a run of a GPT's blocks, with the embedding or the output layer at an end.

What is there has the name that it has in the whole model, so that first weights and checkpoints do
not depend on the stages.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_zpp.model.gpt import GPT
from zeropp import Sharding


@dataclass(kw_only=True)
class Stage:
    """Stage `index` of `count`: the blocks of `layers`; `model` has no others."""

    index: int
    count: int
    layers: range
    model: GPT
    sharding: Sharding | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def __call__(self, received: Tensor | None, *inputs: object, **options: object) -> Tensor:
        """Return what the next stage receives, of the last stage what the whole model returns.

        `received` is what the stage before returned; the other arguments are those of the model.
        """
        return self.model(*inputs, received=received, **options)
