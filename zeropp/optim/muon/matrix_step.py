"""One step of Muon on this rank's shards of matrices.

    gradient  ->  momentum  ->  blocks at their owners  ->  orthogonalized  ->  back, to the weights

Rounds follow each other so that one is computed while the next is on its way.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeropp.optim.muon.blocks import Block, Matrix, Round, Run
from zeropp.optim.muon.exchange import PURPOSE, Exchange, Tensors, joined
from zeropp.optim.muon.line import Line, line_of, matrix_of, peers_of, require_rows
from zeropp.optim.muon.names import BLOCKWISE, NODE, WHOLE
from zeropp.optim.muon.newton_schulz import Peers, flops, orthogonalize, scale
from zeropp.optim.step_or_skip import local_part
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.communicator import connect
from zeropp.wire.traffic import Traffic

MOMENTUM = "momentum_buffer"  # torch.optim.Muon's name


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Where matrices are orthogonalized, and in which numbers.

    blocks: `node`, the rows of a node together, `rank`, or `whole`. whole_every: in steps, all rows
    together in every so-manyth; None: never. tp_mode: Megatron's. quantizes: momentum that crosses
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
class Trained:
    """This rank's rows of a matrix, its gradient and momentum, and the options of its group."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    matrix: Matrix
    peers: Peers | None
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
        self.options, self.traffic = options, Traffic((PURPOSE,))
        self._config, self._device, self._matrices = config, device, dict(matrices)
        self._lines: dict[Tensor, Line] = {}
        self._peers_of: dict[Tensor, Peers | None] = {}
        self._exchanges: dict[tuple[Line, str], Exchange] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what belongs to process groups, which a copy looks up again."""
        return self.__dict__ | {"_lines": {}, "_peers_of": {}, "_exchanges": {}}

    def run(
        self, trained: Iterable[tuple[Tensor, Mapping[str, Any], Mapping, Tensor | None]]
    ) -> None:
        """Update weights and momentum of (parameter, options of its group, state, 16-bit copy)."""
        by_line: dict[tuple[Line, str], list[Trained]] = {}
        for parameter, options, state, copy in trained:
            line = self.line(parameter)
            matrix = self.matrix(parameter)
            each = Trained(
                weight=local_part(parameter),
                gradient=local_part(parameter.grad),
                momentum=local_part(state[MOMENTUM]),
                matrix=matrix,
                peers=self._peers(parameter, matrix),
                options=options,
                copy=copy,
            )
            each.momentum.lerp_(each.gradient, 1 - options["momentum"])
            blocks = self.options.blocks_at(int(state["step"]) + 1)
            by_line.setdefault((line, blocks), []).append(each)
        for (line, blocks), matrices in by_line.items():
            rounds = line.rounds([each.matrix for each in matrices], blocks)
            _Rounds(self._exchange(line, blocks), matrices, self._product_dtype()).run(rounds)

    def expected_traffic(self, parameters: Sequence[Tensor]) -> Counter[tuple[str, str]]:
        """Return the bytes this rank sends per step, by (purpose, hop), for these matrices.

        With `whole_every`, it is the mean of the steps.
        """
        expected: Counter[tuple[str, str]] = Counter()
        for line, matrices in self._by_line(parameters).items():
            for blocks, share in self.options.shares().items():
                sent = self._exchange(line, blocks).expected(line.rounds(matrices, blocks))
                for hop, num_bytes in sent.items():
                    expected[PURPOSE, hop] += num_bytes * share
        return expected

    def flops(self, parameters: Sequence[Tensor], steps: int) -> int:
        """Return the operations of so many iterations of this rank's blocks, the rows of `blocks`.

        With `whole_every`, other steps have others.
        """
        total = 0
        for line, matrices in self._by_line(parameters).items():
            place = line.hop(self.options.blocks).members.index(line.position)
            rounds = line.rounds(matrices, self.options.blocks)
            own = (each for blocks in rounds for each in blocks if each.owner == place)
            total += sum(flops(block.rows, block.columns, steps) for block in own)
        return total

    def _by_line(self, parameters: Sequence[Tensor]) -> dict[Line, list[Matrix]]:
        by_line: dict[Line, list[Matrix]] = {}
        for parameter in parameters:
            by_line.setdefault(self.line(parameter), []).append(self.matrix(parameter))
        return by_line

    def line(self, parameter: Tensor) -> Line:
        """Return the ranks that hold the rows of a parameter."""
        if parameter not in self._lines:
            line = line_of(parameter, self._config)
            require_rows(parameter, self.matrix(parameter), line)
            self._lines[parameter] = line
        return self._lines[parameter]

    def matrix(self, parameter: Tensor) -> Matrix:
        """Return what is known of a parameter's rows."""
        if parameter not in self._matrices:
            self._matrices[parameter] = matrix_of(parameter)
        return self._matrices[parameter]

    def _peers(self, parameter: Tensor, matrix: Matrix) -> Peers | None:
        if parameter not in self._peers_of:
            mode = BLOCKWISE if matrix.is_apart else self.options.tp_mode
            self._peers_of[parameter] = peers_of(parameter, mode)
        return self._peers_of[parameter]

    def _exchange(self, line: Line, blocks: str) -> Exchange:
        if (line, blocks) not in self._exchanges:
            hop = line.hop(blocks)
            self._exchanges[line, blocks] = Exchange(
                dtype=self.options.dtype or torch.bfloat16,
                device=self._device,
                communicator=connect(hop, line.ranks, line.position, self.traffic, PURPOSE),
                quantizes=self.options.quantizes,
            )
        return self._exchanges[line, blocks]

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
    """The rounds of one line in one step."""

    def __init__(self, exchange: Exchange, matrices: Sequence[Trained], dtype: torch.dtype) -> None:
        self.exchange, self.matrices, self.dtype = exchange, matrices, dtype
        communicator = exchange.communicator
        self.size = 1 if communicator is None else communicator.size
        self.place = 0 if communicator is None else communicator.place

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
            rows = [matrix.direction(run).flatten() for run in block.runs[self.place]]
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
            apart = None if trained.peers is None else index
            key = block.rows, block.columns, id(trained.options), apart
            batches.setdefault(key, []).append(index)
        results: dict[int, Tensor] = {}
        for (rows, columns, *_), batch in batches.items():
            trained = self.matrices[own[batch[0]].matrix]
            shape = (rows, columns) if len(batch) == 1 else (len(batch), rows, columns)
            momentum = torch.cat([part for index in batch for part in parts[index]]).view(shape)
            peers = trained.peers and trained.peers._replace(rows=own[batch[0]].peer_rows)
            update = orthogonalize(
                momentum.to(self.dtype),
                trained.options["ns_coefficients"],
                trained.options["eps"],
                peers,
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
            [block.size(self.place) for block in blocks if block.owner == member]
            for member in range(self.size)
        ]
        return self.exchange.start(outgoing, sizes)

    def _move(self, blocks: Round, back: Callable[[], list[Tensors]]) -> None:
        updates = [iter(tensors) for tensors in back()]
        for block in blocks:
            rows = next(updates[block.owner]).view(-1, block.columns)
            lengths = [stop - start for start, stop in block.runs[self.place]]
            for run, update in zip(block.runs[self.place], rows.split(lengths), strict=False):
                self.matrices[block.matrix].move(run, update, block.whole)

    def _owned(self, blocks: Round) -> list[Block]:
        return [block for block in blocks if block.owner == self.place]
