"""One step of Muon on this rank's shards of matrices.

    gradient  ->  momentum  ->  blocks at their owners  ->  orthogonalized  ->  back, to the weights

Rounds follow each other so that one is computed while the next is on its way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeropp.capabilities.muon.blocks import Matrix, MatrixBlock, Round, Run, group_of, rounds_of
from zeropp.capabilities.muon.exchange import Exchange, Tensors, joined
from zeropp.capabilities.muon.newton_schulz import MatrixSplit, flops, orthogonalize, scale
from zeropp.capabilities.muon.settings import BLOCKWISE, NODE, WHOLE
from zeropp.capabilities.muon.sharded_matrix import axis_of, matrix_of, require_rows, split_of
from zeropp.fsdp_adapter import local_part
from zeropp.optim.sharded_optimizer import OPTIMIZER
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.rank_group import Message, RankGroup
from zeropp.wire.traffic import Traffic

MOMENTUM = "momentum_buffer"  # torch.optim.Muon's name


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Where matrices are orthogonalized, and in which numbers.

    blocks: `node`, the rows of a node together, `rank`, or `whole`. whole_every: every P-th step
    uses all rows together; None: never. tp_mode: Megatron's. quantizes: momentum that crosses
    nodes travels as INT8. dtype: of what is sent in nodes and of the products; None: bf16, with
    products in fp32 on CPUs without bf16.
    """

    blocks: str = NODE
    whole_every: int | None = None
    tp_mode: str = BLOCKWISE
    quantizes: bool = False
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, config: ZeroConfig, **others: Any) -> "MuonOptions":
        """Return the options of a JSON, and others."""
        return cls(
            blocks=config.zeropp.muon_blocks,
            whole_every=config.zeropp.muon_whole_every,
            quantizes=config.zero_optimization.zero_quantized_gradients,
            **others,
        )

    def blocks_at(self, step: int) -> str:
        """Return which rows are orthogonalized together in a step, counted from 1."""
        is_due = self.whole_every is not None and step % self.whole_every == 0
        return WHOLE if is_due else self.blocks

    def shares(self) -> dict[str, float]:
        """Return in which share of the steps which rows are orthogonalized together."""
        whole = 0.0 if self.whole_every is None else 1 / self.whole_every
        shares = {self.blocks: 1 - whole}
        shares[WHOLE] = shares.get(WHOLE, 0.0) + whole
        return {blocks: share for blocks, share in shares.items() if share}


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixState:
    """This rank's rows of a matrix, its gradient and momentum, and the options of its group."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    matrix: Matrix
    split: MatrixSplit | None
    options: Mapping[str, Any]
    copy: Tensor | None

    def direction(self, run: Run) -> Tensor:
        """Return the momentum of some rows, with Nesterov's look ahead if the options say so."""
        momentum = _rows(self.momentum, run)
        if not self.options["nesterov"]:
            return momentum
        return _rows(self.gradient, run).lerp(momentum, self.options["momentum"])

    def move(self, run: Run, update: Tensor, whole: tuple[int, int]) -> None:
        """Move some rows against an orthogonalized `update`, after they decay."""
        options, weight = self.options, _rows(self.weight, run)
        lr = float(options["lr"])
        factor = options["extra_scale_factor"] * scale(whole, options["scale_mode"])
        weight.mul_(1 - lr * options["weight_decay"])
        weight.add_(update.to(weight.device), alpha=-lr * factor)
        if self.copy is not None:
            _rows(self.copy, run).copy_(weight)


def _rows(tensor: Tensor, run: Run) -> Tensor:
    """Return rows of a matrix, or of a stack those of one matrix, all that this rank has of it."""
    return tensor[slice(*run)] if tensor.ndim == 2 else tensor[run[0] // tensor.shape[1]]


class MatrixStep:
    """Muon's step for the matrices of one optimizer.

    `matrices` are those with several parts. Collectives run on `device`.
    """

    def __init__(
        self,
        config: ZeroConfig,
        options: MuonOptions,
        device: torch.device,
        matrices: Mapping[Tensor, Matrix],
    ) -> None:
        self.options, self.traffic = options, Traffic((OPTIMIZER,))
        self._config, self._device, self._matrices = config, device, dict(matrices)
        self._axes: dict[Tensor, RankGroup] = {}
        self._splits: dict[Tensor, MatrixSplit | None] = {}
        self._exchanges: dict[tuple[RankGroup, str], Exchange] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what belongs to process groups, which a copy looks up again."""
        return self.__dict__ | {"_axes": {}, "_splits": {}, "_exchanges": {}}

    def run(
        self, trained: Iterable[tuple[Tensor, Mapping[str, Any], Mapping, Tensor | None]]
    ) -> None:
        """Update weights and momentum of (parameter, options of its group, state, 16-bit copy)."""
        by_axis: dict[tuple[RankGroup, str], list[MatrixState]] = {}
        for parameter, options, state, copy in trained:
            matrix = self.matrix(parameter)
            each = MatrixState(
                weight=local_part(parameter),
                gradient=local_part(parameter.grad).float(),
                momentum=local_part(state[MOMENTUM]),
                matrix=matrix,
                split=self._split(parameter, matrix),
                options=options,
                copy=copy,
            )
            each.momentum.lerp_(each.gradient, 1 - options["momentum"])
            blocks = self.options.blocks_at(int(state["step"]) + 1)
            by_axis.setdefault((self.axis(parameter), blocks), []).append(each)
        for (axis, blocks), matrices in by_axis.items():
            rounds = rounds_of(axis, [each.matrix for each in matrices], blocks)
            _Rounds(self._exchange(axis, blocks), matrices, self._product_dtype()).run(rounds)

    def messages(self, parameters: Sequence[Tensor]) -> Iterator[Message]:
        """Yield what this rank sends in a step for these matrices, the mean of the steps."""
        for axis, matrices in self._by_axis(parameters).items():
            for blocks, share in self.options.shares().items():
                rounds = rounds_of(axis, matrices, blocks)
                yield from self._exchange(axis, blocks).messages(rounds, share)

    def flops(self, parameters: Sequence[Tensor], steps: int) -> int:
        """Return the operations of `steps` iterations of this rank's blocks, the rows of `blocks`.

        With `whole_every`, other steps have others.
        """
        total = 0
        for axis, matrices in self._by_axis(parameters).items():
            index = group_of(axis, self.options.blocks).index
            rounds = rounds_of(axis, matrices, self.options.blocks)
            own = (each for blocks in rounds for each in blocks if each.owner == index)
            total += sum(flops(block.rows, block.columns, steps) for block in own)
        return total

    def _by_axis(self, parameters: Sequence[Tensor]) -> dict[RankGroup, list[Matrix]]:
        by_axis: dict[RankGroup, list[Matrix]] = {}
        for parameter in parameters:
            by_axis.setdefault(self.axis(parameter), []).append(self.matrix(parameter))
        return by_axis

    def axis(self, parameter: Tensor) -> RankGroup:
        """Return the ranks that hold the rows of a parameter."""
        if parameter not in self._axes:
            axis = axis_of(parameter, self._config)
            require_rows(parameter, self.matrix(parameter), axis)
            self._axes[parameter] = axis
        return self._axes[parameter]

    def matrix(self, parameter: Tensor) -> Matrix:
        """Return what is known of a parameter's rows."""
        if parameter not in self._matrices:
            self._matrices[parameter] = matrix_of(parameter)
        return self._matrices[parameter]

    def _split(self, parameter: Tensor, matrix: Matrix) -> MatrixSplit | None:
        if parameter not in self._splits:
            mode = BLOCKWISE if matrix.is_apart else self.options.tp_mode
            self._splits[parameter] = split_of(parameter, mode)
        return self._splits[parameter]

    def _exchange(self, axis: RankGroup, blocks: str) -> Exchange:
        if (axis, blocks) not in self._exchanges:
            group = group_of(axis, blocks)
            self._exchanges[axis, blocks] = Exchange(
                group=group.connected(self.traffic, OPTIMIZER) or group,
                dtype=self.options.dtype or torch.bfloat16,
                device=self._device,
                quantizes=self.options.quantizes,
            )
        return self._exchanges[axis, blocks]

    def _product_dtype(self) -> torch.dtype:
        if self.options.dtype is not None:
            return self.options.dtype
        return torch.bfloat16 if self._device.type != "cpu" or cpu_has_bf16() else torch.float32


@cache
def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions to multiply matrices of bf16, as far as PyTorch tells."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.13
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class _Rounds:
    """The rounds of one data axis in one step."""

    def __init__(
        self, exchange: Exchange, matrices: Sequence[MatrixState], dtype: torch.dtype
    ) -> None:
        self.exchange, self.matrices, self.dtype = exchange, matrices, dtype
        self.size, self.index = exchange.group.size, exchange.group.index

    def run(self, rounds: Sequence[Round]) -> None:
        """Move the weights of all blocks."""
        arriving = self._send(rounds[0]) if rounds else None
        returning: tuple[Round, Callable[[], list[Tensors]]] | None = None
        for index, blocks in enumerate(rounds):
            momenta = arriving()
            if index + 1 < len(rounds):
                arriving = self._send(rounds[index + 1])
            back = self._return(blocks, self._orthogonalized(blocks, momenta))
            if returning is not None:
                self._move(*returning)
            returning = blocks, back
        if returning is not None:
            self._move(*returning)

    def _send(self, blocks: Round) -> Callable[[], list[Tensors]]:
        """Send this rank's rows of each block to its owner."""
        outgoing: list[Tensors] = [[] for _ in range(self.size)]
        for block in blocks:
            matrix = self.matrices[block.matrix]
            rows = [matrix.direction(run).flatten() for run in block.runs[self.index]]
            outgoing[block.owner].append(joined(rows, matrix.momentum.new_empty(0)))
        own = self._owned(blocks)
        sizes = [[block.size(member) for block in own] for member in range(self.size)]
        return self.exchange.start(outgoing, sizes)

    def _orthogonalized(self, blocks: Round, momenta: list[Tensors]) -> list[Tensor]:
        """Return the update of each block that this rank owns; those of one shape are a batch."""
        own, parts = self._owned(blocks), [*zip(*momenta, strict=True)]
        batches: dict[tuple, list[int]] = {}
        for index, block in enumerate(own):
            trained = self.matrices[block.matrix]
            apart = None if trained.split is None else index
            key = block.rows, block.columns, id(trained.options), apart
            batches.setdefault(key, []).append(index)
        results: dict[int, Tensor] = {}
        for (rows, columns, *_), batch in batches.items():
            trained = self.matrices[own[batch[0]].matrix]
            shape = (rows, columns) if len(batch) == 1 else (len(batch), rows, columns)
            momentum = torch.cat([part for index in batch for part in parts[index]]).view(shape)
            split = trained.split and trained.split._replace(rows=own[batch[0]].peer_rows)
            update = orthogonalize(
                momentum.to(self.dtype),
                trained.options["ns_coefficients"],
                trained.options["eps"],
                split,
            )
            results |= zip(batch, [update] if len(batch) == 1 else update, strict=True)
        return [results[index] for index in range(len(own))]

    def _return(self, blocks: Round, results: list[Tensor]) -> Callable[[], list[Tensors]]:
        """Send each member its rows of the blocks that this rank owns."""
        own = self._owned(blocks)
        outgoing: list[Tensors] = [[] for _ in range(self.size)]
        for block, result in zip(own, results, strict=True):
            numbers = [block.num_rows(member) for member in range(self.size)]
            for tensors, rows in zip(outgoing, result.split(numbers), strict=True):
                tensors.append(rows.flatten())
        sizes = [
            [block.size(self.index) for block in blocks if block.owner == member]
            for member in range(self.size)
        ]
        return self.exchange.start(outgoing, sizes)

    def _move(self, blocks: Round, back: Callable[[], list[Tensors]]) -> None:
        updates = [iter(tensors) for tensors in back()]
        for block in blocks:
            rows = next(updates[block.owner]).view(-1, block.columns)
            lengths = [stop - start for start, stop in block.runs[self.index]]
            for run, update in zip(block.runs[self.index], rows.split(lengths), strict=False):
                self.matrices[block.matrix].move(run, update, block.whole)

    def _owned(self, blocks: Round) -> list[MatrixBlock]:
        return [block for block in blocks if block.owner == self.index]
