"""Build a rank's sharded, initialized model and its optimizer from a configuration.

The model is built on the meta device, sharded, allocated, and then filled shard by shard: no rank
ever holds more than its shards and one block.

NVIDIA Apex's fused normalization and Adam are used where it is installed; it is always optional.
PyPI has an unrelated package named `apex`. It is recognized, without importing it, by the modules
that it lacks, and is not used.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_zpp.model.attention.attention import QK_NORMS
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import TORCH_NORMS, Execution, NormClasses, Part, parts_of_stages
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.capability import Capability, OwnGroup, capabilities_of, extended
from megatron_zpp.recipe.pipeline import joined
from megatron_zpp.settings.config import Config, OptimizerConfig
from zeropp import Sharding, ZeroConfig, shard
from zeropp.optim import fastest_adamw, local_part
from zeropp.sharding import allocate_parameters

COMPILER = "inductor"
MODULES = ("normalization", "optimizers")  # of Apex
MOMENTS = ("exp_avg", "exp_avg_sq")

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Apex:
    """The classes of an installed NVIDIA Apex."""

    layer_norm: type[nn.Module]
    rms_norm: type[nn.Module]
    adam: type[torch.optim.Optimizer]

    @property
    def norms(self) -> NormClasses:
        """The classes of its normalizations."""
        return NormClasses(layer_norm=self.layer_norm, rms_norm=self.rms_norm)


def build_model(
    config: Config,
    vocab_size: int,
    ranks: Ranks,
    apex: Apex | None,
    fill: Callable[[nn.Module], None] | None = None,
    capabilities: Sequence[Capability] | None = None,
) -> Sharding:
    """Build the GPT of `config.model`, sharded over `ranks` as `config.zero` says.

    `fill` writes the weights; without it they are drawn. `capabilities`, by default new ones, may
    add to the model. Returns what `zeropp.shard` returns; of a pipeline, for this rank's stages.
    """
    seed, shape = config.training.seed, config.model
    zero, parallel = config.zero, config.parallel
    if capabilities is None:
        capabilities = capabilities_of(config, ranks)
    common = Part(
        axes={each.splits: each.axis() for each in capabilities if each.splits},
        execution=Execution(config.recompute, COMPILER if config.training.compile else None),
        norms=apex.norms if apex else TORCH_NORMS,
    ).over(ranks, parallel)

    def build(part: Part) -> GPT:
        with torch.device("meta"):
            return extended(GPT(shape, vocab_size, part), capabilities)

    whole = build(common)
    if ranks.pipeline_size == 1:
        sharding = _shard_model(whole, zero, ranks)
    else:
        layers = parallel.stages(shape.num_layers)
        for each in capabilities:
            each.require_stages(whole, layers)
        parts = parts_of_stages(whole.part, layers, ranks.pipeline_rank, ranks.pipeline_size)
        stages = (_shard_model(build(part), zero, ranks, keeps_root=True) for part in parts)
        sharding = joined(whole, tuple(stages), ranks)
    for each in capabilities:
        each.before_allocation(sharding, ranks.device)
    sharding = allocate_parameters(sharding, zero, ranks.device)
    model = sharding.model
    if fill is None:
        initialize(model, seed, shape)
    else:
        fill(model)
        for each in capabilities:
            each.initialize(model)
    sharding.weights_changed()
    return sharding


def _shard_model(
    model: GPT, zero: ZeroConfig, ranks: Ranks, *, keeps_root: bool = False
) -> Sharding:
    """Shard a model that is on the meta device over the data axis."""
    axes = {module: getattr(module, "own_axis", None) for module in model.modules()}
    # Blocks cast their own inputs, as the residual may be fp32 (--fp32-residual-connection).
    return shard(
        model,
        ranks.mesh,
        zero,
        axis="data",
        experts={module: axis.mesh for module, axis in axes.items() if axis is not None},
        cast_forward_inputs=False,
        keeps_root=keeps_root,
        calls_units=True,
    )


class _Group(NamedTuple):
    """What parameters of a group have in common; groups are in this order."""

    is_embedding: bool
    no_decay: bool
    is_adams: bool  # where others are of the capability's own group


def build_optimizer(
    sharding: Sharding,
    config: OptimizerConfig,
    device: torch.device,
    apex: Apex | None,
    capabilities: Sequence[Capability],
) -> torch.optim.Optimizer:
    """Build a capability's optimizer if one has its own, else AdamW."""
    own = next((each.own_group for each in capabilities if each.own_group), None)
    groups = parameter_groups(
        sharding.model,
        decouples_ends=config.decoupled_lr is not None,
        qk_norms_decay=config.no_weight_decay_cond_type is not None,
        own=own,
    )
    settings = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    for each in capabilities:
        optimizer = each.build_optimizer(sharding, groups, device, settings)
        if optimizer is not None:
            return optimizer
    if apex:
        return ApexAdam(apex, groups, **settings)
    return fastest_adamw(groups, **settings, torch_on_cpu=config.cpu_torch_adam)


def parameter_groups(
    model: nn.Module,
    *,
    decouples_ends: bool = False,
    qk_norms_decay: bool = False,
    own: OwnGroup | None = None,
) -> list[dict]:
    """Return Megatron's groups of trained parameters: matrices decay, biases and gains do not.

    With `decouples_ends`, the token embedding and the output layer are a group of their own. With
    `qk_norms_decay`, what normalizes queries and keys decays too. With `own`, groups say by its key
    whether they have its parameters.
    """
    layers = (getattr(model, name, None) for name in ("tokens", "head"))
    embeddings = [layer.weight for layer in layers if layer is not None]
    groups: dict[_Group, list] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_embedding = decouples_ends and any(parameter is each for each in embeddings)
            is_qk_norm = not QK_NORMS.isdisjoint(name.split("."))
            decays = parameter.ndim >= 2 or (qk_norms_decay and is_qk_norm)
            is_adams = own is None or not own.has(name, parameter)
            group = _Group(is_embedding, no_decay=not decays, is_adams=is_adams)
            groups.setdefault(group, []).append(parameter)
    return [
        {"params": groups[key], "decays": not key.no_decay, "at_ends": key.is_embedding}
        | ({own.key: not key.is_adams} if own else {})
        for key in sorted(groups)
    ]


def find_apex(device: torch.device) -> Apex | None:
    """Return NVIDIA Apex if it can be used on `device`, which must be a CUDA device, or None.

    Logs that it is used, or why an installed package of that name is not.
    """
    if device.type != "cuda":
        return None
    package = importlib.util.find_spec("apex")  # does not import it
    if package is None:
        return None
    folders = package.submodule_search_locations or []
    for module in MODULES:
        if PathFinder.find_spec(f"apex.{module}", folders) is None:
            log.info(
                "ignoring the installed package apex, which is not NVIDIA Apex (no apex.%s)", module
            )
            return None
    try:
        return _load_apex()
    except (ImportError, AttributeError, RuntimeError) as error:
        log.info("NVIDIA Apex is installed but not usable (%s): using PyTorch instead", error)
        return None


class ApexAdam(torch.optim.Optimizer):
    """AdamW with Apex's kernel on this rank's shards; the state has the format of torch's AdamW.

    Apex supports plain tensors only, so `kernel` has parameters of its own, which share the memory
    of the local parts. It counts steps by group, so all parameters of a group must have had the
    same number of gradients.
    """

    def __init__(
        self,
        apex: Apex,
        parameters: Iterable,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(parameters, settings)
        kernel_groups = [
            {"params": [nn.Parameter(_local_view(parameter)) for parameter in group["params"]]}
            for group in self.param_groups
        ]
        self.kernel = apex.adam(kernel_groups, adam_w_mode=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; a closure is not supported."""
        assert closure is None
        for group, kernel_group in zip(self.param_groups, self.kernel.param_groups, strict=True):
            for key in ("lr", "betas", "eps", "weight_decay"):
                kernel_group[key] = group[key]
            parameters = group["params"]
            for parameter, kernel_parameter in zip(parameters, kernel_group["params"], strict=True):
                self._share_memory(parameter, kernel_parameter)
            kernel_group["step"] = self._count_step(parameters)
        self.kernel.step()

    def _share_memory(self, parameter: Tensor, kernel_parameter: nn.Parameter) -> None:
        """Give the kernel's parameter the local memory of values, gradient and moments."""
        kernel_parameter.data, kernel_parameter.grad = _local_view(parameter), None
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)
        if kernel_parameter.numel():
            kernel_parameter.grad = _local_view(parameter.grad)
        self.kernel.state[kernel_parameter] = {
            moment: _local_view(state[moment]) for moment in MOMENTS
        }

    def _count_step(self, parameters: list[Tensor]) -> int:
        """Add 1 to the steps of the parameters with gradients; return the steps before."""
        counters = [
            self.state[parameter]["step"] for parameter in parameters if parameter.grad is not None
        ]
        steps = {int(counter) for counter in counters}
        assert len(steps) <= 1, "some parameters of a group had no gradient in an earlier step"
        for counter in counters:
            counter += 1
        return steps.pop() if steps else 0


def _load_apex() -> Apex:
    normalization, optimizers = (importlib.import_module(f"apex.{module}") for module in MODULES)
    apex = Apex(
        layer_norm=normalization.FusedLayerNorm,
        rms_norm=normalization.FusedRMSNorm,
        adam=optimizers.FusedAdam,
    )
    # Without its CUDA extensions, Apex imports but fails here.
    apex.layer_norm(1)
    apex.adam([nn.Parameter(torch.zeros(1))])
    log.info("using NVIDIA Apex's fused normalization and Adam")
    return apex


def _local_view(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor or DTensor, sharing its memory, outside autograd."""
    return local_part(tensor).detach()
