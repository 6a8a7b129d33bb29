"""Training a model of each family on ranks that share its work prints the numbers of one rank."""

from itertools import product

import pytest

from megatron_zpp.interchange.conversion import import_model
from tests.megatron_zpp.interchange.family_flags import FLAGS, FLAGS_OF_MIXTURES, FLAGS_OF_PIECES
from tests.megatron_zpp.interchange.foreign_models import gpt_oss, saved
from tests.megatron_zpp.parallel.flags import CP2, GATHERED, GPT2, PP2, SP, TP2
from tests.megatron_zpp.train.training_runs import require_equal, run

SHORT = GPT2 + "--train-iters 2 "
AGAIN = "--recompute-granularity full "
EP2 = "--expert-model-parallel-size 2 --zero-stage 3 "
OF_DENSE = FLAGS | FLAGS_OF_PIECES
SCALED = "no gains, scaled queries, norms after rotary"
# The second stage has all layers but one: no pattern of two layers begins with it.
STAGES = PP2 + "--decoder-first-pipeline-num-layers 1 --zero-stage 1 "
# Of which ends, or layers by their number, differ from those of test_axes.py: stages know both.
IN_STAGES = (
    "phi3, a window, a part rotated, tied", "olmo3", "smollm3", "gemma2", "gemma3",
    "gpt_neox, parallel", "bloom", "apertus", SCALED,
)  # fmt: skip
MIXTURES_IN_STAGES = ("qwen2_moe", "granitemoe", "deepseek_v3", "gpt_oss")
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss "


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(OF_DENSE, [TP2 + SP + AGAIN]),
        *product(IN_STAGES, [STAGES]),
        *product(["olmo2", "gemma2", "bloom", "gpt_neox, parallel", "apertus", SCALED], [TP2]),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(name, how, alone, tmp_path):
    """And what was sent is what the forecast says: the log line shows a formula only where not.

    Weights are large, so that scores of attention differ by what each layer does.
    """
    flags = SHORT + "--init-method-std 0.2 " + OF_DENSE[name]
    log = run(2, flags + how, tmp_path)
    require_equal(log, alone(flags))
    assert "(formula: " not in log


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(FLAGS_OF_MIXTURES, [TP2 + SP + AGAIN, EP2]),
        *product(MIXTURES_IN_STAGES, [STAGES]),
        *product(["deepseek_v2", "minimax_m2", "granitemoe"], [TP2]),
    ],
)
def test_mixtures(name, how, alone, tmp_path):
    """Weights are large, so that no two experts are about as good for a token."""
    flags = SHORT + FLAGS_OF_MIXTURES[name] + "--init-method-std 0.2 "
    require_equal(run(2, flags + how, tmp_path), alone(flags))


@pytest.fixture(scope="module")
def with_biases(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flags that go on from a gpt-oss whose biases and sinks are not 0."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    import_model(saved(gpt_oss(vocab_size=52), folder / "hf"), folder / "save")
    return SHORT + f"--load {folder}/save --finetune --use-checkpoint-args --vocab-size 52 "


@pytest.mark.parametrize("how", [TP2 + SP + EP2, TP2 + AGAIN, PP2 + "--zero-stage 1 ", EP2, CP2])
def test_biases_of_experts_and_sinks(how, with_biases, alone, tmp_path):
    """Biases that are trained from 0 hardly show in two steps which rank has which."""
    require_equal(run(2, with_biases + how, tmp_path), alone(with_biases))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mistral", CP2),
        ("mistral", CP2 + GATHERED),
        ("olmo3", CP2 + GATHERED),
        ("gemma2", CP2),
        ("gemma2", CP2 + GATHERED),
        ("gemma3", CP2),
        ("bloom", CP2 + GATHERED),
        ("gpt_neox, parallel", CP2),
        ("gpt_oss", CP2),
        ("gpt_oss", CP2 + GATHERED),
        (SCALED, CP2 + GATHERED),
    ],
)
def test_ranks_that_share_sequences(name, how, alone, tmp_path):
    flags = SHORT + DOCUMENTS + (OF_DENSE | FLAGS_OF_MIXTURES)[name] + "--init-method-std 0.2 "
    require_equal(run(2, flags + how, tmp_path), alone(flags))
