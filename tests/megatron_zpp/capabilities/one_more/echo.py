"""A capability in one file: ranks send each other bytes before each update, and count them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_zpp.recipe.capability import Capability
from megatron_zpp.settings.flag import Section, flag
from zeropp.wire.rank_group import EXCHANGE, Message, RankGroup, everyone
from zeropp.wire.traffic import Traffic

ECHO = "echo"


@dataclass(frozen=True, kw_only=True)
class EchoConfig(Section):
    """What ranks send each other for nothing."""

    echo_bytes: int = flag(0, "bytes that each rank sends each other one in a step", minimum=0)


@dataclass(kw_only=True)
class Echo(Capability):
    """Sends bytes in each step."""

    ledger: Traffic = field(default_factory=lambda: Traffic((ECHO,)))
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    group: RankGroup | None = None

    @property
    def is_on(self) -> bool:
        return self.config.echo.echo_bytes > 0

    @property
    def planned(self) -> RankGroup:
        ranks = range(self.ranks.num_ranks)
        return everyone(self.ranks.nodes, self.ranks.rank, ranks)

    def messages(self, num_micro_batches: int) -> Iterator[Message]:
        num_bytes = self.config.echo.echo_bytes
        yield Message(group=self.planned, kind=EXCHANGE, num_bytes=num_bytes, purpose=ECHO)

    def memory(self) -> Mapping[str, int]:
        return {"what comes back": self.config.echo.echo_bytes * self.ranks.num_ranks}

    def before_update(self, step: int) -> None:
        self.group = self.group or self.planned.connected(self.ledger, ECHO)
        own = torch.ones(self.group.size * self.config.echo.echo_bytes, dtype=torch.uint8)
        self.group.all_to_all(torch.empty_like(own), own)

    def after_update(self, step: int, *, last: bool) -> None:
        self.count += 1

    def state(self) -> Mapping[str, Tensor]:
        return {"echo.count": self.count.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.count.copy_(state["echo.count"])

    def rows(self) -> Iterator[tuple[str, str]]:
        yield ECHO, f"{self.config.echo.echo_bytes} bytes a step, after {self.count} steps"

    def changes(self, saved: Mapping[str, Mapping], num_ranks: int) -> Iterator[str]:
        yield f"echo: {saved['echo']['echo_bytes']} bytes in the checkpoint"


SECTIONS = {"echo": EchoConfig}
PURPOSES = (ECHO,)
CAPABILITY = Echo
