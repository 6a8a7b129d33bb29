"""Plain FSDP2 of a mixture of experts that ranks split, as torchtitan and transformers shard it.

The experts of a layer are a unit on the ranks that have the same ones; the mean of their gradients
is over the losses of all ranks.
"""

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.training_loops import wire_policy
from megatron_zpp.capabilities.experts.axis import NAME
from megatron_zpp.capabilities.experts.experts import Experts
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import Part
from megatron_zpp.recipe.capability import capabilities_of


def fsdp2_experts(setup: TrainingSetup) -> GPT:
    """Return the model of the set-up, sharded and initialized."""
    config, ranks = setup.config, setup.ranks
    (axis,) = (each.axis() for each in capabilities_of(config, ranks) if each.splits == NAME)
    with torch.device("meta"):
        model = GPT(config.model, setup.vocab_size, Part(axes={NAME: axis}))
    policy = wire_policy(setup)
    for experts in [each for each in model.modules() if isinstance(each, Experts) and axis]:
        mesh = axis.mesh[axis.mesh.mesh_dim_names[0]]
        fully_shard(experts, mesh=mesh, mp_policy=policy)
        experts.set_gradient_divide_factor(float(ranks.data.size()))
        if mesh.size() > 1:  # gloo has no sum of products; FSDP2 divides twice on one rank
            experts.set_force_sum_reduction_for_comms(True)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=ranks.data, mp_policy=policy)
    model.to_empty(device=ranks.device)
    initialize(model, config.training.seed, config.model)
    return model
