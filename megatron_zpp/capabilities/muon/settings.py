"""How Muon moves the matrices of blocks; where it orthogonalizes them the JSON says."""

from dataclasses import dataclass, fields

from megatron_zpp.settings.flag import Section, flags_in, needs
from zeropp.capabilities.muon import COEFFICIENT_TYPES, SCALE_MODES, TP_MODES

_flag = flags_in("flags.toml", package=__package__, no_effect=needs("--optimizer muon"))


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Section):
    """Muon: momentum of matrices, orthogonalized."""

    muon_momentum: float = _flag(0.9)
    muon_nesterov: bool = _flag(False)
    muon_no_split_qkv: bool = _flag(False)
    muon_scale_mode: str = _flag("spectral", choices=SCALE_MODES)
    muon_extra_scale_factor: float = _flag(1.0)
    muon_num_ns_steps: int = _flag(5)
    muon_coefficient_type: str = _flag("quintic", choices=COEFFICIENT_TYPES)
    muon_tp_mode: str = _flag("blockwise", choices=TP_MODES)
    muon_fp32_matmul_prec: str = _flag("medium")


SECTIONS = {"muon": MuonConfig}
UPDATES = {"muon": tuple(field.name for field in fields(MuonConfig))}  # settings that change them
OPTIMIZERS = {"muon": "Muon for matrices of blocks and Adam for the rest"}  # of --optimizer
SYNONYMS = {"dist_muon": "muon"}
