"""A small model with experts that ranks split, and the same in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.nn import functional as F

VOCAB_SIZE, HIDDEN_SIZE, FFN_SIZE, TOP_K = 37, 16, 8, 2


class _Gathered(torch.autograd.Function):
    """Rows of all ranks of a group, one rank's after another's."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.size = group, len(x)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank() * ctx.size :][: ctx.size].clone(), None


class _Summed(torch.autograd.Function):
    """The sum over the ranks of a group, of which each one uses a part."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Experts(nn.Module):
    """MLPs of which each token passes through some; a rank with a mesh has some of them."""

    def __init__(self, num_experts: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.num_experts, self.mesh = num_experts, mesh
        self.up = self._split(torch.randn(num_experts * FFN_SIZE, HIDDEN_SIZE) * 0.2)
        self.down = self._split(torch.randn(num_experts * HIDDEN_SIZE, FFN_SIZE) * 0.2)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map x [N, H] with weights [N, E], most of them 0, to [N, H]."""
        if self.mesh is None:
            return self._sum(x, weights, 0)
        group, place = self.mesh.get_group(1), self.mesh.get_local_rank(1)
        size = len(x)
        x = _Gathered.apply(x, group)
        weights = _Gathered.apply(weights, group)
        first = place * (self.num_experts // self.mesh.size(1))
        total = _Summed.apply(self._sum(x, weights, first), group)
        return total[place * size :][:size].clone()

    def _sum(self, x: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor:
        own = [
            each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down)
        ]
        ups, downs = own[0].view(-1, FFN_SIZE, HIDDEN_SIZE), own[1].view(-1, HIDDEN_SIZE, FFN_SIZE)
        total = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
            output = F.silu(x @ up.T) @ down.T
            total = total + output * weights[:, first + expert, None]
        return total

    def _split(self, whole: torch.Tensor) -> nn.Parameter:
        if self.mesh is None:
            return nn.Parameter(whole)
        part = whole.chunk(self.mesh.size(1))[self.mesh.get_local_rank(1)].clone()
        axis = self.mesh[self.mesh.mesh_dim_names[1]]
        return nn.Parameter(DTensor.from_local(part, axis, [ShardPlacement(0)], run_check=False))


class Block(nn.Module):
    def __init__(self, num_experts: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.router = nn.Linear(HIDDEN_SIZE, num_experts, bias=False)
        self.experts = Experts(num_experts, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        chosen = scores.topk(TOP_K)
        weights = torch.zeros_like(scores).scatter(1, chosen.indices, chosen.values)
        return x + self.experts(rows, weights).view(x.shape)


class ExpertModel(nn.Module):
    """Predicts the next of tokens [B, S]; `mesh` is the experts', with the ranks of one on its
    first axis. A seed gives the same weights on all ranks."""

    def __init__(
        self, num_experts: int, mesh: DeviceMesh | None = None, num_blocks: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.blocks = nn.ModuleList([Block(num_experts, mesh) for _ in range(num_blocks)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x, self.embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @property
    def experts(self) -> list[Experts]:
        return [block.experts for block in self.blocks]


def expert_mesh(size: int) -> DeviceMesh:
    """All ranks: `size` consecutive ones split the experts."""
    shape = dist.get_world_size() // size, size
    return init_device_mesh("cpu", shape, mesh_dim_names=("expert_data", "expert"))
