"""Muon's keys in the JSON, and the names of its choices."""

from dataclasses import dataclass
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, NoEffect, key

COEFFICIENT_TYPES = ("simple", "quintic", "polar_express")
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
NODE, RANK, WHOLE = BLOCKS = ("node", "rank", "whole")
BLOCKWISE, DUPLICATED, DISTRIBUTED = TP_MODES = ("blockwise", "duplicated", "distributed")

_NEEDS_MUON = NoEffect('it needs optimizer.type "Muon"', when=lambda c: c.optimizer.type != "Muon")


@dataclass(frozen=True, kw_only=True)
class MuonRates(JsonSection):
    """`muon_lr`: in place of `lr`, for Muon's matrices. `adam_lr`: for what AdamW updates."""

    path: ClassVar[str] = "optimizer.params"

    muon_lr: float | None = key(None, minimum=0)
    adam_lr: float | None = key(None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class MuonBlocks(JsonSection):
    """`muon_blocks`: which rows of a matrix Muon orthogonalizes together: those of a `node`, of a
    `rank`, or the `whole` matrix. `muon_whole_every`: every P-th step uses the whole matrix.
    """

    path: ClassVar[str] = "zeropp"

    muon_blocks: str = key(NODE, choices=BLOCKS, no_effect=_NEEDS_MUON)
    muon_whole_every: int | None = key(None, minimum=1, no_effect=_NEEDS_MUON)


KEYS = (MuonRates, MuonBlocks)
