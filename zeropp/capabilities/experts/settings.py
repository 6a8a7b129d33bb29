"""The keys of DeepSpeed's AutoEP, by which ranks split the experts of a layer."""

from dataclasses import dataclass
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, NoEffect, key, needs


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(JsonSection):
    """DeepSpeed's AutoEP, by which `autoep_size` ranks split the experts of a layer."""

    path: ClassVar[str] = "expert_parallel"

    enabled: bool = key(
        False,
        no_effect=NoEffect(
            "with autoep_size 1 each rank gathers all experts of a block",
            when=lambda c: c.expert_parallel.autoep_size == 1,
        ),
    )
    autoep_size: int = key(1, minimum=1, no_effect=needs("expert_parallel.enabled"))


@dataclass(frozen=True, kw_only=True)
class ExpertKeys(JsonSection):
    path: ClassVar[str] = ""

    expert_parallel: ExpertParallel = key(ExpertParallel())

    @property
    def expert_ranks(self) -> int:
        """How many consecutive ranks split the experts of a layer, as DeepSpeed's AutoEP does."""
        return self.expert_parallel.autoep_size if self.expert_parallel.enabled else 1


KEYS = (ExpertKeys,)
