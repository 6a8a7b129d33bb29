"""Training loops that are compared: ours, and what a person would write with PyTorch alone.

All start from the same weights, see the same micro-batches, clip, and update with fused AdamW. A
step may return before its numbers are known, so that no loop waits where a person would not. Loops
for one device hold the model in bf16 beside fp32 master weights, and keep their batches.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.shared.pretrain_run import silent_run, training_batches
from benchmarks.shared.training_setup import CLIP, LEARNING_RATE, WEIGHT_DECAY, TrainingSetup
from megatron_zpp.data.loader import Batch
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import name_table
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import WHOLE, Execution, Part
from megatron_zpp.train.pending_iteration import PendingIteration
from zeropp import attach, shard
from zeropp.optim.step_or_skip import local_part

LossOf = Callable[[Batch], Tensor]
Logits = Callable[[Tensor, Tensor], Tensor]  # of tokens and positions [B, S]: [B, S, V]
Steps = Iterator[Sequence[Batch]]  # the micro-batches of one step after another
# Waits for a step, then gives its mean loss and the norm of its gradients.
StepNumbers = Callable[[], tuple[float, Tensor | float]]
HUGGING_FACE = "hf"
DEVICE_LOOPS = MappingProxyType(  # by the name of the flag --peers
    {
        "blocks": "bare loop, compiled blocks",
        "eager": "bare loop, not compiled",
        HUGGING_FACE: "Hugging Face, not compiled",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """A model in training; each call of `step` begins a step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], StepNumbers]
    global_loss: bool = False  # the loss is the mean over all ranks, not this rank's
    close: Callable[[], None] = lambda: None


def ours(setup: TrainingSetup, name: str = "ours") -> TrainingLoop:
    """The loop of pretrain_gpt.py: data loader, schedules, step, and the last step's log."""
    run = silent_run(setup.config, setup.ranks)
    batches = training_batches(run)
    unfinished: list[PendingIteration] = []

    def step() -> StepNumbers:
        previous = unfinished.pop() if unfinished else None
        current = run.trainer.step(batches, previous)
        if previous:
            previous.result()
        unfinished.append(current)
        return partial(numbers_of, current)

    def numbers_of(iteration: PendingIteration) -> tuple[float, float]:
        unfinished[:] = [other for other in unfinished if other is not iteration]
        measured = iteration.result()
        return measured.loss, measured.grad_norm

    return TrainingLoop(
        name=name,
        model=run.trainer.sharding.model,
        optimizer=run.trainer.optimizer,
        step=step,
        global_loss=True,
        close=batches.close,
    )


def plain_pytorch(setup: TrainingSetup, name: str, steps: Steps) -> TrainingLoop:
    """The same layers on one rank in a plain loop."""
    return _clipping_loop(name, unsharded(setup), setup, steps)


def fsdp2(setup: TrainingSetup, name: str, steps: Steps, *, attached: bool = False) -> TrainingLoop:
    """Plain FSDP2 with our dtypes on the wire; `attached`: with our collectives (`attach`)."""
    model, policy = unsharded(setup), wire_policy(setup)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=setup.ranks.mesh, mp_policy=policy)
    if attached:
        attach(model, setup.config.zero)
    return _clipping_loop(name, model, setup, steps)


def sharded(setup: TrainingSetup, name: str, steps: Steps) -> TrainingLoop:
    """`zeropp.shard` in the loop of plain FSDP2."""
    model = unsharded(setup)
    shard(model, setup.ranks.mesh, setup.config.zero)
    return _clipping_loop(name, model, setup, steps)


def device_loop(
    setup: TrainingSetup,
    kind: str,
    weights: Mapping[str, Tensor],
    steps: Sequence[Sequence[Batch]],
) -> TrainingLoop:
    """One of `DEVICE_LOOPS` from `weights` over `steps`, again and again.

    Weights are bf16 with fp32 masters. Raises ImportError without the package that it needs.
    """
    is_compiled, endless_steps = kind == "blocks", itertools.cycle(steps)
    if kind == HUGGING_FACE:
        model, logits_of = _hugging_face(setup, weights)
    else:
        model, logits_of = _same_layers(setup, weights, is_compiled)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    cross_entropy = torch.compile(_cross_entropy) if is_compiled else _cross_entropy
    optimizer = adamw(masters)

    def loss_of(batch: Batch) -> Tensor:
        return cross_entropy(logits_of(batch.tokens, batch.position_ids), batch.labels)

    def step() -> StepNumbers:
        loss = accumulate(next(endless_steps), loss_of)
        norm = _update(model, masters, optimizer)
        return lambda: (loss.item(), norm.item())

    return TrainingLoop(name=DEVICE_LOOPS[kind], model=model, optimizer=optimizer, step=step)


def why_not(kind: str) -> str | None:
    """Why one of `DEVICE_LOOPS` cannot run here; None if it can."""
    is_missing = kind == HUGGING_FACE and find_spec("transformers") is None
    return "not installed" if is_missing else None


def accumulate(
    batches: Sequence[Batch],
    loss_of: LossOf,
    context: Callable[..., AbstractContextManager] = lambda *, last: nullcontext(),
) -> Tensor:
    """Add up the gradients of one step's micro-batches; returns their mean loss.

    Each micro-batch runs within `context(last=...)`, which is told whether it is the last one.
    """
    total = torch.zeros((), device=batches[0].tokens.device)
    for index, batch in enumerate(batches):
        with context(last=index == len(batches) - 1):
            loss = loss_of(batch)
            (loss / len(batches)).backward()
        total += loss.detach() / len(batches)
    return total


def model_loss_of(model: nn.Module) -> LossOf:
    """The model's own loss."""
    return lambda batch: model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)


def wire_policy(setup: TrainingSetup) -> MixedPrecisionPolicy:
    """FSDP2's policy with the dtypes that our collectives send."""
    zero = setup.config.zero
    dtypes = (getattr(torch, name) for name in (zero.compute_format, zero.wire_format))
    return MixedPrecisionPolicy(*dtypes)


def unsharded(setup: TrainingSetup) -> GPT:
    """The model on the meta device, without memory."""
    with torch.device("meta"):
        return GPT(setup.config.model, setup.vocab_size)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Fused AdamW in Megatron's two groups: matrices decay, biases and gains do not."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def local_weights(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards by name, in the order of their names."""
    named = sorted(model.named_parameters())
    return {name: local_part(parameter.detach()) for name, parameter in named}


def _clipping_loop(name: str, model: GPT, setup: TrainingSetup, steps: Steps) -> TrainingLoop:
    """Initialize the model; accumulate, clip, update."""
    model.to_empty(device=setup.ranks.device)
    initialize(model, setup.config.training.seed, setup.config.model)
    optimizer, loss_of = adamw(model.parameters()), model_loss_of(model)

    def step() -> StepNumbers:
        loss = accumulate(next(steps), loss_of)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return lambda: (loss.item(), norm)

    return TrainingLoop(name=name, model=model, optimizer=optimizer, step=step)


def _same_layers(
    setup: TrainingSetup, weights: Mapping[str, Tensor], is_compiled: bool
) -> tuple[nn.Module, Logits]:
    """Our layers in fp32, the blocks compiled if asked, and a function that computes logits."""
    part = Part(execution=Execution(backend="inductor")) if is_compiled else WHOLE
    with torch.device("meta"):
        model = GPT(setup.config.model, setup.vocab_size, part)
    model.to_empty(device=setup.ranks.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model, lambda tokens, positions: model(tokens, position_ids=positions)


def _hugging_face(setup: TrainingSetup, weights: Mapping[str, Tensor]) -> tuple[nn.Module, Logits]:
    """Hugging Face's GPT-2 of the same shape with the same weights in fp32, and its logits.

    Raises KeyError if the names of weights do not match.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = setup.config.model
    rows = ours.padded_vocab_size(setup.vocab_size)
    config = GPT2Config(
        vocab_size=rows,
        n_positions=ours.num_positions,
        n_embd=ours.hidden_size,
        n_layer=ours.num_layers,
        n_head=ours.num_attention_heads,
        activation_function="gelu_pytorch_tanh" if ours.bias_gelu_fusion else "gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        layer_norm_epsilon=ours.layernorm_epsilon,
        attn_implementation="sdpa",
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device(setup.ranks.device):
        model = GPT2LMHeadModel(config)
    sizes, values = Sizes(model=ours, vocab_rows=rows, padded_rows=rows), {}
    for name, weight in weights.items():
        row = name_table("gpt2").row(name)
        values |= dict(zip(row.hf_names, row.form.split(weight, sizes), strict=True))
    parameters = dict(model.named_parameters())
    if missing := set(parameters) ^ set(values):
        raise KeyError(f"not the same weights: {', '.join(sorted(missing))}")
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return model, lambda tokens, positions: model(input_ids=tokens, position_ids=positions).logits


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of logits [B, S, V] in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _update(model: nn.Module, masters: list[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Clip and update the masters from the model's gradients; returns the gradients' norm."""
    copies = list(model.parameters())
    wide = [torch.empty_like(master) for master in masters]
    torch._foreach_copy_(wide, [copy.grad for copy in copies])
    for copy, master, gradient in zip(copies, masters, wide, strict=True):
        master.grad, copy.grad = gradient, None
    norm = nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        torch._foreach_copy_(copies, masters)
    return norm
