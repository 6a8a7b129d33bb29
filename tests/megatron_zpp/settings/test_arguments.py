"""Every flag by its name, what has no effect or is not there yet, and what is messages of it."""

import json
import logging

import pytest

from megatron_zpp.settings.arguments import FLAGS, parse
from megatron_zpp.settings.config import SECTIONS
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from tests.megatron_zpp.settings.command_lines import IDLE, config_of, error_of, value_at
from tests.megatron_zpp.settings.expert_flags import OF_EXPERTS
from tests.megatron_zpp.settings.model_flags import OF_MODEL

# What is typed, the setting it fills, and its value; one line for each flag of Megatron's.
SETTINGS = (
    OF_MODEL
    + """
--skip-samples 16:24                    data.skip_samples ["16:24"]
--optimizer dist_muon                 optimizer.optimizer "muon"
--muon-momentum 0.8                   muon.muon_momentum 0.8
--muon-nesterov                       muon.muon_nesterov true
--muon-use-nesterov                   muon.muon_nesterov true
--muon-no-split-qkv                   muon.muon_no_split_qkv true
--muon-scale-mode unit_rms_norm       muon.muon_scale_mode "unit_rms_norm"
--muon-extra-scale-factor 0.2         muon.muon_extra_scale_factor 0.2
--muon-num-ns-steps 6                 muon.muon_num_ns_steps 6
--muon-coefficient-type simple        muon.muon_coefficient_type "simple"
--muon-tp-mode distributed            muon.muon_tp_mode "distributed"
--muon-fp32-matmul-prec highest       muon.muon_fp32_matmul_prec "highest"
--micro-batch-size 2                  batch.micro_batch_size 2
--batch-size 2                        batch.micro_batch_size 2
--global-batch-size 16                batch.global_batch_size 16
--train-iters 7                       training.train_iters 7
--train-samples 700                   training.train_samples 700
--train-tokens 300e9                  training.train_tokens 300000000000
--exit-interval 5                     training.exit_interval 5
--exit-duration-in-mins 30            training.exit_duration_in_mins 30
--exit-signal-handler                 training.exit_signal_handler true
--exit-signal-handler-for-training    training.exit_signal_handler true
--exit-signal SIGUSR1                 training.exit_signal "SIGUSR1"
--manual-gc                           training.manual_gc true
--manual-gc-interval 7                training.manual_gc_interval 7
--no-manual-gc-eval                   training.no_manual_gc_eval true
--disable-manual-gc-eval              training.no_manual_gc_eval true
--deterministic-mode                  training.deterministic_mode true
--calculate-per-token-loss            training.calculate_per_token_loss true
--skip-train                          training.skip_train true
--no-train                            training.skip_train true
--kill-switch-path f                  training.kill_switch_path "f"
--kill-switch-file f                  training.kill_switch_path "f"
--seed 42                             training.seed 42
--compile                             training.compile true
--tensor-model-parallel-size 1        parallel.tensor_model_parallel_size 1
--model-parallel-size 1               parallel.tensor_model_parallel_size 1
--pipeline-model-parallel-size 1      parallel.pipeline_model_parallel_size 1
--context-parallel-size 1             parallel.context_parallel_size 1
--distributed-backend gloo            parallel.distributed_backend "gloo"
--distributed-timeout-minutes 3       parallel.distributed_timeout_minutes 3
--use-megatron-fsdp                   zero.stage 3
--use-custom-fsdp                     zero.stage 3
--use-torch-fsdp2                     zero.stage 3
--data-parallel-sharding-strategy optim zero.stage 1
--grad-reduce-in-bf16                 zero.communication_data_type "bf16"
--megatron-fsdp-grad-comm-dtype fp32  zero.communication_data_type "fp32"
--optimizer-offload-fraction 0.5      zero.zero_optimization.offload_optimizer.ratio 0.5
--use-distributed-optimizer           zero.stage 1
--zero-stage 2                        zero.stage 2
--remote-device none                  zero.zero_optimization.offload_param.device "none"
--checkpoint-activations              recompute.recompute_granularity "full"
--deepspeed-activation-checkpointing  recompute.recompute_granularity "full"
--recompute-activations               recompute.recompute_granularity "selective"
--recompute-granularity full          recompute.recompute_method "uniform"
--recompute-granularity selective     recompute.recompute_granularity "selective"
--checkpoint-num-layers 2             recompute.recompute_num_layers 2
--recompute-num-layers 2              recompute.recompute_num_layers 2
--data-path a                         data.data_path ["a"]
--data-path=a                         data.data_path ["a"]
--data-path .7 a .3 b                 data.data_path [".7", "a", ".3", "b"]
--train-data-path a                   data.train_data_path ["a"]
--valid-data-path a                   data.valid_data_path ["a"]
--test-data-path a                    data.test_data_path ["a"]
--data-args-path f                    data.data_args_path "f"
--per-split-data-args-path f          data.per_split_data_args_path "f"
--train-weighted-split-paths t        data.train_weighted_split_paths ["t"]
--valid-weighted-split-paths v w      data.valid_weighted_split_paths ["v", "w"]
--test-weighted-split-paths t         data.test_weighted_split_paths ["t"]
--train-weighted-split-paths-path f   data.train_weighted_split_paths_path "f"
--valid-weighted-split-paths-path f   data.valid_weighted_split_paths_path "f"
--test-weighted-split-paths-path f    data.test_weighted_split_paths_path "f"
--split-ranges 0:0.9 .9:1 0:1         data.split_ranges ["0:0.9", ".9:1", "0:1"]
--split 949,50,1                      data.split "949,50,1"
--data-cache-path c                   data.data_cache_path "c"
--fim-rate 0.5                        fim.fim_rate 0.5
--fim-spm-rate 0.25                   fim.fim_spm_rate 0.25
--fim-split-sample <file_sep>         fim.fim_split_sample "<file_sep>"
--fim-fragment-rate 0.75              fim.fim_fragment_rate 0.75
--fim-no-prefix #                     fim.fim_no_prefix "#"
--fim-prefix-token p                  fim.fim_prefix_token "p"
--fim-middle-token m                  fim.fim_middle_token "m"
--fim-suffix-token s                  fim.fim_suffix_token "s"
--fim-pad-token p                     fim.fim_pad_token "p"
--num-workers 0                       data.num_workers 0
--dataloader-type cyclic              data.dataloader_type "cyclic"
--reset-position-ids                  data.reset_position_ids true
--reset-attention-mask                data.reset_attention_mask true
--eod-mask-loss                       data.eod_mask_loss true
--mock-data                           data.mock_data true
--tokenizer-type NullTokenizer        tokenizer.tokenizer_type "NullTokenizer"
--vocab-file v                        tokenizer.vocab_file "v"
--merge-file m                        tokenizer.merge_file "m"
--tokenizer-model t                   tokenizer.tokenizer_model "t"
--tokenizer-name-or-path t            tokenizer.tokenizer_model "t"
--tokenizer-file t                    tokenizer.tokenizer_model "t"
--vocab-size 300                      tokenizer.vocab_size 300
--null-tokenizer-eod-id 7             tokenizer.null_tokenizer_eod_id 7
--eval-iters -1                       evaluation.eval_iters 0
--vocab-extra-ids 3                   tokenizer.vocab_extra_ids 3
--tokenizer-hf-no-include-special-tokens tokenizer.tokenizer_hf_no_include_special_tokens true
--optimizer adam                      optimizer.optimizer "adam"
--optimizer FusedAdamW                optimizer.optimizer "adam"
--lr 6e-5                             optimizer.lr 6e-5
--lr 6e-5                             schedule.lr 6e-5
--min-lr 1e-6                         schedule.min_lr 1e-6
--min-lr 1e-6                         optimizer.min_lr 1e-6
--decoupled-lr 1e-4                   schedule.decoupled_lr 1e-4
--decoupled-lr 1e-4                   optimizer.decoupled_lr 1e-4
--lr-decay-style cosine               schedule.lr_decay_style "cosine"
--lr-decay-style inverse-square-root  schedule.lr_decay_style "inverse-square-root"
--lr-decay-style constant             schedule.lr_decay_style "constant"
--lr-decay-iters 9                    schedule.lr_decay_iters 9
--lr-decay-samples 9                  schedule.lr_decay_samples 9
--lr-decay-tokens 9000                schedule.lr_decay_tokens 9000
--lr-warmup-fraction .01              schedule.lr_warmup_fraction 0.01
--warmup .01                          schedule.lr_warmup_fraction 0.01
--lr-warmup-iters 3                   schedule.lr_warmup_iters 3
--lr-warmup-samples 3                 schedule.lr_warmup_samples 3
--lr-warmup-tokens 3                  schedule.lr_warmup_tokens 3
--lr-warmup-init 1e-7                 schedule.lr_warmup_init 1e-7
--lr-wsd-decay-style minus_sqrt       schedule.lr_wsd_decay_style "minus_sqrt"
--lr-wsd-decay-iters 3                schedule.lr_wsd_decay_iters 3
--lr-wsd-decay-samples 3              schedule.lr_wsd_decay_samples 3
--override-opt_param-scheduler        schedule.override_opt_param_scheduler true
--override-opt-param-scheduler        schedule.override_opt_param_scheduler true
--override-lr-scheduler               schedule.override_opt_param_scheduler true
--use-checkpoint-lr-scheduler         schedule.use_checkpoint_opt_param_scheduler true
--use-checkpoint-opt_param-scheduler  schedule.use_checkpoint_opt_param_scheduler true
--weight-decay 0.1                    optimizer.weight_decay 0.1
--clip-grad 0.5                       optimizer.clip_grad 0.5
--apply-wd-to-qk-layernorm            optimizer.no_weight_decay_cond_type "apply_wd_to_qk_layernorm"
--adam-beta1 0.8                      optimizer.adam_beta1 0.8
--adam-beta2 0.95                     optimizer.adam_beta2 0.95
--adam-eps 1e-6                       optimizer.adam_eps 1e-6
--use-torch-optimizer-for-cpu-offload optimizer.cpu_torch_adam true
--cpu_torch_adam                      optimizer.cpu_torch_adam true
--fp16                                precision.fp16 true
--bf16                                precision.bf16 true
--loss-scale 128                      precision.loss_scale 128.0
--initial-loss-scale 65536            precision.initial_loss_scale 65536.0
--min-loss-scale 2                    precision.min_loss_scale 2.0
--loss-scale-window 500               precision.loss_scale_window 500
--hysteresis 3                        precision.hysteresis 3
--save s                              checkpoint.save "s"
--load s                              checkpoint.load "s"
--ckpt-step 7                         checkpoint.ckpt_step 7
--no-load-lr-state                    checkpoint.no_load_lr_state true
--persistent-save-interval 5          checkpoint.save_interval 5
--keep-checkpoints 3                  checkpoint.keep_checkpoints 3
--save-retain-interval 6              checkpoint.save_retain_interval 6
--async-save                         checkpoint.async_save true
--no-save-optim                       checkpoint.no_save_optim true
--no-load-optim                       checkpoint.no_load_optim true
--no-verify-checkpoint               checkpoint.no_verify_checkpoint true
--finetune                            checkpoint.finetune true
--reset-iteration                     checkpoint.reset_iteration true
--reset-progress                      checkpoint.reset_iteration true
--eval-iters 0                        evaluation.eval_iters 0
--eval-interval 50                    evaluation.eval_interval 50
--log-interval 1                      log.log_interval 1
--tensorboard-dir t                   log.tensorboard_dir "t"
--tensorboard-queue-size 5            log.tensorboard_queue_size 5
--tensorboard-log-interval 2          log.tensorboard_log_interval 2
--log-timers-to-tensorboard           log.log_timers_to_tensorboard true
--log-batch-size-to-tensorboard       log.log_batch_size_to_tensorboard true
--log-validation-ppl-to-tensorboard   log.log_validation_ppl_to_tensorboard true
--log-optimizer-states-to-tensorboard log.log_optimizer_states_to_tensorboard true
--log-memory-to-tensorboard           log.log_memory_to_tensorboard true
--log-all-axes-to-tensorboard         log.log_all_axes_to_tensorboard true
--log-world-size-to-tensorboard       log.log_world_size_to_tensorboard true
--plan-file plan.json                  log.plan_file "plan.json"
--log-params-norm                     log.log_params_norm true
--log-num-zeros-in-grad               log.log_num_zeros_in_grad true
--logging-level 40                    log.logging_level 40
--log-level 40                        log.logging_level 40
--log-level warning                   log.logging_level 30
--log-format megatron                 log.log_format "megatron"
--log-throughput                      log.log_throughput true
--wandb-project p                     log.wandb_project "p"
--wandb-project-name p                log.wandb_project "p"
--wandb-exp-name e                    log.wandb_exp_name "e"
--wandb-entity e                      log.wandb_entity "e"
--wandb-entity-name e                 log.wandb_entity "e"
--wandb-save-dir d                    log.wandb_save_dir "d"
"""
)

# Flags that need another one beside them.
PAIRS = """
--profile --tensorboard-dir board                       log.profile true
--profile --tensorboard-dir board --profile-step-start 3   log.profile_step_start 3
--profile --tensorboard-dir board --profile-step-end 20    log.profile_step_end 20
--profile --tensorboard-dir board --profile-ranks 0 2      log.profile_ranks [0,2]
--pretrained-checkpoint m                             lora.pretrained_checkpoint "m"
--pretrained-checkpoint m --lora-rank 4               lora.lora_rank 4
--pretrained-checkpoint m --lora-rank 4 --lora-alpha 8  lora.lora_alpha 8.0
--pretrained-checkpoint m --lora-rank 4 --lora-dropout 0.1  lora.lora_dropout 0.1
--pretrained-checkpoint m --lora-rank 4 --lora-target-modules qkv mlp.gate \
    lora.lora_target_modules ["qkv", "mlp.gate"]
--pipeline-model-parallel-size 2                     parallel.pipeline_model_parallel_size 2
--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8 \
    parallel.num_virtual_stages_per_pipeline_rank 2
--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8 \
    parallel.num_layers_per_virtual_pipeline_stage 1
--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 \
    parallel.decoder_first_pipeline_num_layers 1
--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 \
    parallel.decoder_last_pipeline_num_layers 1
--pipeline-model-parallel-size 2 --pp-partition-method type:transformer|embedding \
    parallel.pp_partition_method "type:transformer|embedding"
--step-batch-size-schedule 0:4 2.5k:8 \
    batch.step_batch_size_schedule ["0:4", "2.5k:8"]
--rampup-batch-size 4 4 60 --global-batch-size 16    batch.rampup_batch_size [4, 4, 60]
--recompute-method block --recompute-granularity full recompute.recompute_method "block"
--decoupled-lr 1e-4 --decoupled-min-lr 1e-5           schedule.decoupled_min_lr 1e-5
--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward   zero.stage 2
--lr-decay-style WSD --lr-wsd-decay-iters 3          schedule.lr_decay_style "WSD"
--start-weight-decay 0 --end-weight-decay 1 --weight-decay-incr-style cosine \
    optimizer.end_weight_decay 1.0
--start-weight-decay 0 --end-weight-decay 1 --weight-decay-incr-style linear \
    optimizer.start_weight_decay 0.0
--save s --save-interval 5                           checkpoint.save_interval 5
--load s --use-checkpoint-args                       checkpoint.use_checkpoint_args true
--load s --exit-on-missing-checkpoint                checkpoint.exit_on_missing_checkpoint true
--rotary-position-embeddings-theta 7 --swiglu        model.rotary_base 7
--sequence-parallel --tensor-model-parallel-size 2   parallel.sequence_parallel true
--cp-comm-type a2a                                   parallel.cp_comm_type "a2a"
--expert-model-parallel-size 2 --num-experts 4 --disable-bias-linear \
    parallel.expert_model_parallel_size 2
--moe-dispatch-bits 8 --num-experts 4 --disable-bias-linear   parallel.moe_dispatch_bits 8
"""

UNAVAILABLE = """
--cp-comm-type p2p
--remote-device nvme
"""


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.strip()]


@pytest.mark.parametrize("line", lines(SETTINGS) + lines(PAIRS))
def test_a_flag_fills_its_setting_in_every_spelling(line):
    words = line.split()
    sections = {"zero", *SECTIONS}
    at = next(i for i, word in enumerate(words) if word.partition(".")[0] in sections)
    typed, path, value = words[:at], words[at], json.loads(" ".join(words[at + 1 :]))
    other = [w.replace("-", "_").replace("__", "--", 1) if w[:2] == "--" else w for w in typed]
    dashes = [w.replace("_", "-") if w[:2] == "--" else w for w in typed]
    num_ranks = 2 if {"--sequence-parallel", "--pipeline-model-parallel-size"} & {*typed} else 1
    for spelled in (typed, other, dashes):
        assert value_at(parse(spelled, num_ranks), path) == value, spelled


def test_every_setting_is_covered():
    """A field added to a section without a line above fails here."""
    tried = {
        word.partition("=")[0]
        for word in (SETTINGS + PAIRS + IDLE + UNAVAILABLE + OF_EXPERTS).split()
    }
    tried = {word.replace("_", "-") for word in tried}
    ours = {"--eval-at-start", "--sample-prompt", "--sample-length", "--deepspeed-config"}
    ours |= {"--cpu-optimizer", "--no-position-embedding", "--dry-run", "--dry-run-ranks"}
    idle = {flag.shown.replace("_", "-") for flag in flags_without_effect()}
    for flag in FLAGS:
        spelled = {f"--{name}".replace("_", "-") for name in [*flag.names, *flag.shorthands]}
        assert spelled & (tried | ours | idle), flag.name


@pytest.mark.parametrize("line", lines(IDLE))
def test_a_flag_without_effect_says_so_once(line, caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    plain = config_of("")
    assert "has no effect" not in caplog.text
    caplog.clear()
    config = config_of(line)
    logged = [record.getMessage() for record in caplog.records]
    messages = [message for message in logged if "no effect" in message]
    assert len(messages) == 1 and messages[0].startswith(line.split()[0].partition("=")[0])
    assert config.training == plain.training and config.batch == plain.batch


@pytest.mark.parametrize("line", lines(UNAVAILABLE))
def test_what_is_not_built_yet_says_so(line):
    message = error_of(line)
    assert line.split()[0].lstrip("-") in message or "offload_param.device" in message
    assert "not available" in message


def test_weights_on_the_host_need_the_optimizer_there():
    message = error_of("--remote-device cpu --zero-stage 3")
    assert "offload_param" in message and "the optimizer on the CPU too" in message


def test_experts_are_not_split_by_the_json(tmp_path):
    file = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    assert "--expert-model-parallel-size" in error_of("", 1, file, tmp_path)


def test_offload_needs_shards():
    assert "offload_optimizer.device" in error_of("--cpu-optimizer --zero-stage 0")


def test_no_bias_gelu_fusion_says_that_it_changes_numerics(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config_of("--no-bias-gelu-fusion")
    assert "--no-bias-gelu-fusion: the exact (erf) GELU" in caplog.text
