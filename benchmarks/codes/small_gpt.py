"""A small GPT in training on this process, whose weights and gradients are quantized."""

from torch import Tensor

from benchmarks.shared.pretrain_run import run_step, silent_run, training_batches
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.settings.arguments import parse
from zeropp.optim.step_or_skip import local_part
from zeropp.ranks.topology import Environment


class SmallGPT:
    """Trains with pretrain_gpt.py's own step, on one rank at stage 0; a context manager."""

    def __init__(self, flags: str, iterations: int) -> None:
        words = [*flags.split(), "--train-iters", str(iterations), "--eval-iters", "0"]
        config = parse([*words, "--zero-stage", "0", "--seed", "1"], 1)
        self._run = silent_run(config, join_ranks(Environment(), config.parallel))
        self._batches = training_batches(self._run)
        self._model = self._run.trainer.sharding.model

    def __enter__(self) -> "SmallGPT":
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def step(self) -> float:
        """Train for one iteration; returns the loss."""
        return run_step(self._run, self._batches).loss

    def matrices(self) -> dict[str, Tensor]:
        """Copies of the weights that would be quantized, those with two dimensions, by name."""
        return {name: local_part(weight.detach()).clone() for name, weight in self._weights()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of these weights of the next samples, by name."""
        self._model.zero_grad()
        samples = self._run.config.batch.global_batch_size
        self._run.trainer.forward_backward(self._batches, samples, 1.0)
        gradients = {name: local_part(weight.grad).clone() for name, weight in self._weights()}
        self._model.zero_grad()
        return gradients

    def _weights(self) -> list[tuple[str, Tensor]]:
        return [pair for pair in self._model.named_parameters() if pair[1].dim() > 1]
