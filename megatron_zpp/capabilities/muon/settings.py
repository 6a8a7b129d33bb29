"""How Muon moves the matrices of blocks; where it orthogonalizes them the JSON says."""

from dataclasses import dataclass, fields

from megatron_zpp.settings.flag import Section, flag_that_needs
from zeropp.capabilities.muon.settings import COEFFICIENT_TYPES, SCALE_MODES, TP_MODES

_muon_flag = flag_that_needs("--optimizer muon", lambda c: c.optimizer.optimizer == "muon")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Section):
    """Muon: momentum of matrices, orthogonalized."""

    muon_momentum: float = _muon_flag(
        0.9, "decay of the momentum", minimum=0, below=1, same_as="optimizer.params.momentum"
    )
    muon_nesterov: bool = _muon_flag(
        False,
        "look ahead by one step of the momentum",
        aliases=("muon-use-nesterov",),
        same_as="optimizer.params.nesterov",
    )
    muon_no_split_qkv: bool = _muon_flag(
        False, "orthogonalize queries, keys and values together (default: each by itself)"
    )
    muon_scale_mode: str = _muon_flag(
        "spectral",
        "factor of the update: spectral √max(rows, columns), unit_rms_norm √(rows / columns), "
        "shape_scaling the same but at least 1",
        choices=SCALE_MODES,
    )
    muon_extra_scale_factor: float = _muon_flag(
        1.0, "a further factor; 0.2 with spectral makes updates as large as Adam's", above=0
    )
    muon_num_ns_steps: int = _muon_flag(
        5, "Newton-Schulz iterations", minimum=1, maximum=99, same_as="optimizer.params.ns_steps"
    )
    muon_coefficient_type: str = _muon_flag(
        "quintic",
        "coefficients of the iterations: simple, those of Jordan et al. 2024, for each; quintic "
        "and polar_express, others for each",
        choices=COEFFICIENT_TYPES,
    )
    muon_tp_mode: str = _muon_flag(
        "blockwise",
        "matrices split by tensor parallelism: each part by itself, all parts on each rank, or "
        "products summed over the ranks",
        choices=TP_MODES,
    )
    muon_fp32_matmul_prec: str = _muon_flag(
        "medium",
        "precision of the iterations: medium bf16, high and highest fp32",
        choices=("medium", "high", "highest"),
    )


SECTIONS = {"muon": MuonConfig}
UPDATES = {"muon": tuple(field.name for field in fields(MuonConfig))}  # settings that change them
OPTIMIZERS = {"muon": "Muon for matrices of blocks and Adam for the rest"}  # of --optimizer
SYNONYMS = {"dist_muon": "muon"}
