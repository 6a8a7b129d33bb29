"""A stage of a pipeline: a run of a GPT's blocks, with the embedding or the output layer at an end.

It is a GPT whose other parts are missing. What is there has the name that it has in the whole
model, so that first weights and checkpoints do not depend on the stages.
"""

from dataclasses import dataclass, field

from torch import Tensor, nn

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
    _received: Tensor | None = field(default=None, init=False)

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
        self._received = received
        try:
            return self.model(*inputs, **options)
        finally:
            self._received = None

    def cut(self) -> None:
        """Remove from the model, which is on the meta device, what other stages compute."""
        model = self.model
        for index in set(range(len(model.blocks))).difference(self.layers):
            model.blocks[index] = Elsewhere()
        if model.head is None:
            model.tokens.weight.num_stages = 2  # the first and the last hold it; it counts once
        elif not self.is_first:
            model.tokens = None
        if not self.is_first:
            model.positions = model.embed_norm = None
            model.embed = lambda *_: self._received
        if not self.is_last:
            model.norm = model.head = None
            model.output = lambda x, *_: x
        if not (self.is_first or self.is_last):
            model.tokens = None


class Elsewhere(nn.Module):
    """In the place of a block that another stage computes; passes on what it is called with."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Return x."""
        return x
