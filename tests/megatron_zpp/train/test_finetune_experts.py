"""Fine-tuning a mixture of experts with adapters on the experts."""

from pathlib import Path

import pytest

from tests.megatron_zpp.interchange.foreign_mixtures import qwen2_moe
from tests.megatron_zpp.parallel.flags import PP2, SP, TP2
from tests.megatron_zpp.train.finetuning import flags_for, with_json
from tests.megatron_zpp.train.training_runs import require_equal, run

EXPERTS = "--lora-target-modules attention.qkv experts.gate experts.input experts.output "
EP1, EP2, EP4 = (f"--expert-model-parallel-size {size} " for size in (1, 2, 4))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a tiny mixture, one of whose three layers is dense, and of examples for it."""
    model = qwen2_moe(vocab_size=104, num_experts=8, num_hidden_layers=4, mlp_only_layers=[1])
    return flags_for(model, tmp_path_factory.mktemp("mixture")) + EXPERTS


@pytest.fixture(scope="module")
def expected(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of one rank."""
    return run(1, f"{base} --clip-grad 0.1 ", tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("how", "zero"),
    [
        (EP1, {"stage": 3}),
        (EP2, {"stage": 2}),
        (EP4, {"stage": 3}),
        (EP2 + TP2 + SP + "--recompute-granularity full ", {"stage": 3}),
        (EP1 + TP2 + SP, {"stage": 1}),
        (TP2, {"stage": 3}),
        (EP2 + PP2, {"stage": 1}),
    ],
)
def test_adapters_learn_the_same_whoever_has_the_experts(
    base: str, how: str, zero: dict, expected: str, tmp_path: Path
) -> None:
    flags = f"{base} --clip-grad 0.1 {how} {with_json(tmp_path / 'zero.json', zero)}"
    log = run(4, flags, tmp_path)
    require_equal(log, expected)
