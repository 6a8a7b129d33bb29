"""Flags as public launch scripts give them together: they are taken, and each has its effect.

The scripts are those of BigScience (BLOOM, and its 1.3B trials), BigCode (StarCoder), Habana and
Megatron-LM, each reduced to its flags, with a model that is small.
"""

import logging
import shlex

import pytest

from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.settings.command_lines import config_of, error_of
from tests.megatron_zpp.settings.fork_flags import OF_FORKS
from zeropp.errors import InputError

SMALL = "--num-layers 10 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
BLOOM = SMALL + (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
    "--pp-partition-method type:transformer|embedding --max-position-embeddings 32 "
    "--micro-batch-size 2 --rampup-batch-size 16 16 9_765 --global-batch-size 256 "
    "--train-samples 220_000 --tokenizer-type PretrainedFromHF --tokenizer-name-or-path bloom "
    "--init-method-std 0.0048 --embed-layernorm --bf16 --seed 42 --position-embedding-type alibi "
    "--checkpoint-activations --abort-on-unmet-fused-kernel-constraints --kill-switch-path kill "
    "--pad-vocab-size-to 250880 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --lr 6e-5 "
    "--min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200_000 --lr-warmup-samples 183 "
    "--exit-duration-in-mins 5990 --log-interval 1 --save-interval 100 --eval-interval 1000 "
    "--eval-iters 1 --tensorboard-dir t --tensorboard-queue-size 5 --save c --load c "
    "--train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path valid.txt "
    "--num-workers 2 --valid-num-workers 0 --data-impl mmap --distributed-backend nccl --deepspeed "
    "--zero-stage 0 --deepspeed-activation-checkpointing --sync-tp-duplicated-parameters"
)
TRIALS = SMALL + (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1 "
    "--global-batch-size 16 --train-samples 5_000 --train-tokens 100_000_000 --vocab-file v "
    "--merge-file m --loss-scale 12 --clip-grad 1.0 --fp16 --checkpoint-activations "
    "--position-embedding-type rotary --glu-activation swiglu --lr-decay-samples 4_000 "
    "--lr-decay-tokens 150_000 --lr-warmup-samples 100 --codecarbon-dir c --log-level info "
    "--log-level-replica error --data-path p --split 949,50,1 --no-train"
)
STARCODER = SMALL + (
    "--tensor-model-parallel-size 2 --attention-head-type multiquery --init-method-std 0.015625 "
    "--max-position-embeddings 32 --attention-dropout 0.1 --micro-batch-size 1 "
    "--global-batch-size 16 --lr 0.0003 --min-lr 0.00003 --train-iters 250 --lr-decay-iters 250 "
    "--lr-warmup-iters 20 --fim-rate 0.5 --bf16 --use-flash-attn --use-distributed-optimizer "
    "--valid-num-workers 0 --tokenizer-type TokenizerFromFile --tokenizer-file t --save c --load c "
    "--train-weighted-split-paths-path train --valid-weighted-split-paths-path valid "
    "--structured-logs --structured-logs-dir l --tensorboard-dir t --wandb-entity-name e "
    "--wandb-project-name p"
)
HABANA = SMALL + (
    "--deepspeed --ffn-hidden-size 96 --micro-batch-size 1 --global-batch-size 16 --train-iters 9 "
    "--optimizer fusedadamw --adam-eps 1e-8 --use-torch-compile=false "
    "--use-torch-compiled-autograd=false --compiled-autograd-fallback-mode=nothing --zero-stage=1 "
    "--exit-interval 4 --bf16 --untie-embeddings-and-output-weights --swiglu "
    "--normalization rmsnorm --disable-bias-linear --no-query-key-layer-scaling "
    "--use-fused-sdpa 1 --use-fused-sdpa-with-recompute 0 --use-fused-rmsnorm 1 "
    "--use-rotary-position-embeddings --rotary-position-embeddings-theta 500000 "
    "--num-key-value-heads 2 --kill-switch-path k --use-fast-softmax --data-path p"
)
MEGATRON_LM = SMALL + (
    "--use-mcore-models --position-embedding-type rope --rotary-interleaved --rotary-percent 1.0 "
    "--rotary-base 500000 --padded-vocab-size 1280 --swiglu --group-query-attention "
    "--num-query-groups 2 --num-distributed-optimizer-instances 2 --use-megatron-fsdp "
    "--outer-dp-sharding-strategy optim --log-energy --train-iters 9 --mock-data "
    "--kill-switch-file k --tokenizer-type NullTokenizer --vocab-size 1000"
)
# Those that stood in the way of most of 164 public scripts, and what each says or sets.
ASKED = {
    "--no-train": "training.skip_train",
    "--pp-partition-method type:transformer --pipeline-model-parallel-size 2": (
        "parallel.pp_partition_method"
    ),
    "--abort-on-unmet-fused-kernel-constraints": "PyTorch's fused kernels",
    "--pad-vocab-size-to 1280": "model.pad_vocab_size_to",
    "--position-embedding-type rotary": "model.position_embedding_type",
    "--glu-activation geglu": "model.geglu",
    "--num-query-groups 1 --tensor-model-parallel-size 2": "model.num_query_groups",
    "--train-weighted-split-paths t": "data.train_weighted_split_paths",
    "--valid-weighted-split-paths t": "data.valid_weighted_split_paths",
    "--test-weighted-split-paths t": "data.test_weighted_split_paths",
    "--fim-rate 0.5": "fim.fim_rate",
    "--lr-decay-tokens 9000": "schedule.lr_decay_tokens",
    "--log-level warning": "log.logging_level",
    "--codecarbon-dir c": "neither power nor emissions are measured",
    "--rotary-interleaved --position-embedding-type rope": "model.rotary_interleaved",
    "--num-distributed-optimizer-instances 2": "gives the same updates",
}


@pytest.mark.parametrize(
    ("line", "ranks"),
    [(BLOOM, 32), (TRIALS, 2), (STARCODER, 4), (HABANA, 2), (MEGATRON_LM, 4)],
    ids=["BLOOM", "trials", "StarCoder", "Habana", "Megatron-LM"],
)
def test_the_flags_of_a_script_are_taken(line, ranks):
    config_of(line, ranks)


@pytest.mark.parametrize("line", ASKED)
def test_each_of_them_has_its_effect_or_says_why_not(line, caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config, expected = config_of(line, 2), ASKED[line]
    idle = [message for message in caplog.messages if "no effect" in message]
    said = [message for message in idle if line.split()[0] in message]
    section, _, name = expected.partition(".")
    if not hasattr(config, section):
        assert len(said) == 1 and expected in said[0]
        return
    assert not said
    of_none = config_of("", 2)
    values = [getattr(getattr(each, section), name) for each in (config, of_none)]
    assert values[0] != values[1]


@pytest.mark.parametrize("flag", OF_FORKS)
def test_no_flag_of_a_fork_is_unknown(flag):
    beside = "--pipeline-model-parallel-size 2" if "partition" in flag else ""
    try:
        parse(shlex.split(f"{flag} {OF_FORKS[flag]} {beside}"), 2)
    except InputError as error:
        assert str(error).startswith(f"{flag} is not available: ")


def test_bloom_has_as_many_blocks_and_embeddings_on_each_rank():
    """70 blocks and 2 embeddings on 12 ranks, as its authors describe them."""
    line = BLOOM.replace("size 4 --pp", "size 12 --pp") + " --num-layers 70"
    parallel = config_of(line, 96).parallel
    assert [len(stage) for stage in parallel.stages(70)] == [5, *[6] * 10, 5]


@pytest.mark.parametrize(
    ("method", "counts"),
    [("uniform", [2, 2, 3, 3]), ("type:Transformer", [2, 2, 3, 3]),
     ("type:transformer|embedding", [2, 3, 3, 2])],
)  # fmt: skip
def test_shares_of_a_pipeline_differ_by_one_at_most(method, counts):
    line = BLOOM.replace("type:transformer|embedding", method)
    assert [len(stage) for stage in config_of(line, 32).parallel.stages(10)] == counts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--pp-partition-method parameters", "type:transformer|embedding counts each embedding"),
        ("--pp-partition-method type:norm", "expected uniform, type:transformer or"),
        ("--pp-partition-method type:(", "expected uniform, type:transformer or"),
        ("--pp-partition-method uniform --decoder-first-pipeline-num-layers 1", "both divide"),
        ("--pp-partition-method type:transformer|embedding --num-layers 2", "have no block"),
        ("--pad-vocab-size-to 1000 --make-vocab-size-divisible-by 128", "not a multiple"),
        ("--pad-vocab-size-to 1001 --tensor-model-parallel-size 2", "--pad-vocab-size-to 1001"),
        ("--glu-activation geglu --swiglu", "the MLP has one activation"),
        ("--glu-activation gelu", "expected one of geglu, liglu, reglu, swiglu"),
        ("--log-level loud", "or debug, info, warning, error, critical"),
    ],
)
def test_what_does_not_fit_says_what_to_do(line, words):
    assert words in error_of(f"{line} --pipeline-model-parallel-size 4", 8)
