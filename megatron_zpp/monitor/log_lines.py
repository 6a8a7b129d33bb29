"""The lines of the log: Megatron's, which other programs parse, and short ones for a terminal.

Megatron's are Megatron-DeepSpeed's to the letter, with two deliberate differences: a loss is
printed on skipped iterations too, and a NaN is printed. The short ones leave out what the start-up
table says, and fit a terminal of 80 columns.
"""

from dataclasses import dataclass

from megatron_zpp.monitor.communication import (
    ACROSS_NODES,
    COUNTS,
    MIB,
    Communication,
    size,
    sum_over,
)
from megatron_zpp.monitor.memory import MemoryUse
from megatron_zpp.monitor.metrics import Interval, Iteration, Validation
from megatron_zpp.settings.capability_flags import CAPABILITIES
from zeropp.settings import declared

COLUMNS = 80
GAP = "  "
SPARE = (
    "lr",
    "eta",
    "others",
    "sent",
    "throughput",
    "speed",
)  # left out in this order where a short line is too long
FAR, NEAR = " between nodes", "/node"  # what follows the bytes of a step, and where space is short


@dataclass(frozen=True)
class MegatronLines:
    """Megatron-DeepSpeed's lines.

    `throughput` adds Megatron-LM's field of that name and its shares of two rates.
    """

    throughput: bool = False

    def interval(self, interval: Interval) -> list[str]:
        """The line of an interval, and a second one with the bytes that a node sent."""
        last = interval.last
        milliseconds = interval.seconds_per_iteration * 1000
        fields = [
            f"iteration {last.iteration:8d}/{last.train_iters:8d}",
            f"consumed samples: {last.consumed_samples:12d}",
            f"consumed tokens: {last.consumed_tokens:12d}",
            f"elapsed time per iteration (ms): {milliseconds:.1f}",
            *(_throughput_fields(interval) if self.throughput else []),
            f"learning rate: {last.learning_rate:.3E}",
            f"global batch size: {last.global_batch_size:5d}",
            f"lm loss: {interval.loss:.6E}",
            *_of_capabilities("FIELDS", last),
            *_optional_fields(last),
            f"actual seqlen: {last.seq_length:5d}",
            f"number of skipped iterations: {interval.skipped:3d}",
            f"number of nan iterations: {interval.nan:3d}",
            *([f"empty micro-batches: {interval.empty_share:.2%}"] if interval.empty_share else []),
            f"samples per second: {interval.samples_per_second:.3f}",
            f"tokens per gpu per second (tgs): {interval.tokens_per_gpu_per_second:.3f}",
            f"TFLOPs: {interval.tflops:.2f}",
        ]
        line = "".join(f" {text} |" for text in fields)
        return [line, last.communication.line()] if last.communication else [line]

    def validation(self, validation: Validation) -> list[str]:
        """The held-out line between two rules."""
        line = (
            f" validation loss at {validation.moment} | "
            f"lm loss value: {validation.loss:.6E} | lm loss PPL: {validation.perplexity:.6E} | "
        )
        rule = "-" * (len(line) + 1)
        return [rule, line, rule]

    def memory(self, rank: int, memory: MemoryUse, iteration: int) -> str:
        """What a rank holds after an iteration."""
        fields = {
            "allocated": memory.allocated_bytes,
            "max allocated": memory.peak_allocated_bytes,
            "reserved": memory.reserved_bytes,
            "max reserved": memory.peak_reserved_bytes,
        }
        numbers = "".join(f" | {name}: {value / MIB}" for name, value in fields.items())
        return f"[Rank {rank}] (after {iteration} iterations) memory (MB){numbers}"


@dataclass(frozen=True)
class ShortLines:
    """Lines of at most 80 columns, e.g. "step 90/200  loss 6.931  lr 1.4e-3  12.3k tok/s".

    `throughput` adds MFU, or FLOP/s where the peak of the device is not known.
    """

    throughput: bool = False

    def interval(self, interval: Interval) -> list[str]:
        """One line: what changes, and what is unusual."""
        last = interval.last
        width = len(str(last.train_iters))
        seconds_left = (last.train_iters - last.iteration) * interval.seconds_per_iteration
        fields = {
            "step": f"step {last.iteration:{width}}/{last.train_iters}",
            "loss": f"loss {_loss(interval.loss)}",
            "lr": f"lr {_learning_rate(last.learning_rate):>6}",
            "speed": f"{size(interval.tokens_per_second, COUNTS):>5} tok/s",
            "throughput": _throughput(interval) if self.throughput else "",
            "others": GAP.join(_of_capabilities("SHORT_FIELDS", last)),
            "unusual": ", ".join(_unusual(interval)),
            "sent": _sent_between_nodes(last.communication),
            "eta": f"eta {duration(seconds_left)}" if seconds_left else "",
        }
        return [_fitting({name: text for name, text in fields.items() if text})]

    def validation(self, validation: Validation) -> list[str]:
        """One line with the held-out loss."""
        name = "held-out" if validation.split == "validation" else validation.split
        perplexity = validation.perplexity
        digits = 1 if perplexity < 1000 else 0
        return [
            f"step {validation.iteration}  {name} loss {_loss(validation.loss)}  "
            f"perplexity {perplexity:,.{digits}f}"
        ]

    def memory(self, rank: int, memory: MemoryUse, iteration: int) -> str:
        """The most that a rank has held."""
        allocated, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
        return (
            f"memory of rank {rank} after {iteration} steps: at most {size(allocated)} in use, "
            f"{size(reserved)} reserved"
        )


def duration(seconds: float) -> str:
    """For example 2:10, 1:02:10 or 4d 6h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _fitting(fields: dict[str, str]) -> str:
    """The line of the fields, as far as they fit."""
    fields = dict(fields)
    if len(line := GAP.join(fields.values())) > COLUMNS:
        line = line.replace(FAR, NEAR)
    for spare in SPARE:
        if len(line) <= COLUMNS:
            break
        fields.pop(spare, None)
        line = GAP.join(fields.values()).replace(FAR, NEAR)
    return line


def _unusual(interval: Interval) -> list[str]:
    """What most intervals do not have."""
    shares = {
        "skipped": interval.skipped and str(interval.skipped),
        "nan": interval.nan and str(interval.nan),
        "empty": interval.empty_share and f"{interval.empty_share:.1%}",
    }
    return [f"{text} {name}" for name, text in shares.items() if text]


def _throughput(interval: Interval) -> str:
    if interval.mfu is not None:
        return f"MFU {interval.mfu:.1%}"
    return f"{interval.model_tflops:.1f} TFLOP/s"


def _sent_between_nodes(communication: Communication | None) -> str:
    """Bytes that a node sends others in a step; nothing on one node."""
    sent = sum_over(communication.sent_per_step, ACROSS_NODES) if communication else 0
    return f"{size(sent)}{FAR}" if sent else ""


def _loss(loss: float) -> str:
    """Five characters up to 99.99."""
    return f"{loss:5.{3 if loss < 10 else 2}f}"


def _learning_rate(rate: float) -> str:
    """For example 1.4e-3."""
    digits, exponent = f"{rate:.1e}".split("e")
    return f"{digits}e{int(exponent)}" if rate else "0"


def _of_capabilities(kind: str, last: Iteration) -> list[str]:
    """Fields of what capabilities measured, as the functions in their modules `log` write it."""
    written = (fields(last.others) for fields in declared(kind, CAPABILITIES, "log"))
    return [text for texts in written for text in texts]


def _throughput_fields(interval: Interval) -> list[str]:
    fields = [f"throughput per GPU (TFLOP/s/GPU): {interval.model_tflops:.1f}"]
    if interval.share_of_measured_rate is not None:
        fields.append(f"share of measured matmul rate: {interval.share_of_measured_rate:.1%}")
    if interval.mfu is not None:
        fields.append(f"MFU: {interval.mfu:.1%}")
    return fields


def _optional_fields(last: Iteration) -> list[str]:
    values = [
        ("loss scale: {:.1f}", last.loss_scale),
        ("grad norm: {:.3f}", last.grad_norm),
        ("num zeros: {:.1f}", last.num_zeros),
        ("params norm: {:.3f}", last.params_norm),
    ]
    return [template.format(value) for template, value in values if value is not None]
