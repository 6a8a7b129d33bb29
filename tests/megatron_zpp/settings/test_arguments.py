"""Every flag by its name, what has no effect or is not there yet, and what is messages of it."""

import json
import logging

import pytest

from megatron_zpp.settings.arguments import FLAGS, parse
from megatron_zpp.settings.config import SECTIONS
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from tests.megatron_zpp.settings.command_lines import IDLE, config_of, error_of, value_at
from tests.megatron_zpp.settings.expert_flags import OF_EXPERTS

# What is typed, the setting it fills, and its value; one line for each flag of Megatron's.
SETTINGS = """
--num-layers 3                        model.num_layers 3
--encoder-num-layers 3                model.num_layers 3
--hidden-size 512                     model.hidden_size 512
--num-attention-heads 8               model.num_attention_heads 8
--seq-length 32                       model.seq_length 32
--encoder-seq-length 32               model.seq_length 32
--skip-samples 16:24                    data.skip_samples ["16:24"]
--max-position-embeddings 1024        model.max_position_embeddings 1024
--ffn-hidden-size 77                  model.ffn_hidden_size 77
--kv-channels 16                      model.kv_channels 16
--init-method-std 0.006               model.init_method_std 0.006
--hidden-dropout 0                    model.hidden_dropout 0.0
--attention-dropout 0.2               model.attention_dropout 0.2
--layernorm-epsilon 1e-6              model.layernorm_epsilon 1e-6
--norm-epsilon 1e-6                   model.layernorm_epsilon 1e-6
--normalization RMSNorm               model.normalization "RMSNorm"
--normalization rmsnorm               model.normalization "RMSNorm"
--make-vocab-size-divisible-by 8      model.make_vocab_size_divisible_by 8
--no-pad-vocab-size                   model.make_vocab_size_divisible_by 1
--disable-pad-vocab-size              model.make_vocab_size_divisible_by 1
--pad-vocab-size-to 640               model.make_vocab_size_divisible_by 640
--pad-vocab-size-to 640               model.pad_vocab_size_to 640
--padded-vocab-size 640               model.pad_vocab_size_to 640
--position-embedding-type rotary      model.position_embedding_type "rope"
--position-embedding-type absolute    model.position_embedding_type "learned_absolute"
--use-alibi-position-embeddings       model.position_embedding_type "alibi"
--rotary-interleaved                  model.rotary_interleaved true
--liglu                               model.liglu true
--glu-activation geglu                model.geglu true
--glu-activation geglu                model.bias_gelu_fusion false
--glu-activation swiglu               model.ffn_hidden_size 1024
--glu-activation liglu                model.liglu true
--untie-embeddings-and-output-weights model.untie_embeddings_and_output_weights true
--disable-bias-linear                 model.disable_bias_linear true
--swiglu                              model.swiglu true
--openai-gelu                         model.openai_gelu true
--squared-relu                        model.squared_relu true
--use-rotary-position-embeddings      model.position_embedding_type "rope"
--position-embedding-type rope        model.position_embedding_type "rope"
--position-embedding-type none        model.position_embedding_type "none"
--rotary-percent 0.25                 model.rotary_percent 0.25
--rotary-base 500000                  model.rotary_base 500000
--use-rope-scaling                    model.use_rope_scaling true
--use-rope-scaling --rope-scaling-factor 32   model.rope_scaling_factor 32.0
--num-key-value-heads 2               model.num_query_groups 2
--num-query-groups 2                  model.num_query_groups 2
--group-query-attention               model.num_query_groups 1
--attention-head-type multiquery      model.num_query_groups 1
--no-bias-gelu-fusion                 model.bias_gelu_fusion false
--add-qkv-bias                        model.add_qkv_bias true
--qk-layernorm                        model.qk_layernorm true
--qk-layernorm-across-heads           model.qk_layernorm_across_heads true
--window-size 127,0                   model.window_size "127,0"
--window-attn-skip-freq 4             model.window_attn_skip_freq "4"
--no-rope-freq [0,0,0,1]              model.no_rope_freq "[0,0,0,1]"
--rotary-base-local 10000             model.rotary_base_local 10000
--rope-scaling-low-freq-factor 2      model.rope_scaling_low_freq_factor 2
--rope-scaling-high-freq-factor 6     model.rope_scaling_high_freq_factor 6
--rope-scaling-original-positions 64  model.rope_scaling_original_positions 64
--no-yarn-correction-range-round-to-int  model.yarn_correction_range_round_to_int false
--add-attention-output-bias           model.add_attention_output_bias true
--add-mlp-bias                        model.add_mlp_bias true
--relu                                model.relu true
--reglu                               model.reglu true
--rotary-seq-len-interpolation-factor 8  model.rotary_seq_len_interpolation_factor 8
--longrope-original-positions 8192    model.longrope_original_positions 8192
--longrope-attention-factor 1.19      model.longrope_attention_factor 1.19
--longrope-short-factors 1 2 --longrope-long-factors 3 4.5 --kv-channels 4 model.kv_channels 4
--rope-type yarn                      model.rope_type "yarn"
--rotary-scaling-factor 4             model.rotary_scaling_factor 4.0
--yarn-original-max-position-embeddings 8192  model.yarn_original_max_position_embeddings 8192
--yarn-beta-fast 30                   model.yarn_beta_fast 30.0
--yarn-beta-slow 2                    model.yarn_beta_slow 2.0
--yarn-attention-factor 1.2           model.yarn_attention_factor 1.2
--multi-latent-attention --q-lora-rank 12 model.q_lora_rank 12
--multi-latent-attention --kv-lora-rank 8 model.kv_lora_rank 8
--multi-latent-attention --qk-head-dim 16 model.qk_head_dim 16
--multi-latent-attention --qk-pos-emb-head-dim 8 model.qk_pos_emb_head_dim 8
--multi-latent-attention --v-head-dim 16 model.v_head_dim 16
--multi-latent-attention --rotary-scaling-factor 40 --mscale 0.7 model.mscale 0.7
--multi-latent-attention --rotary-scaling-factor 40 --mscale-all-dim 0.7 model.mscale_all_dim 0.7
--embedding-multiplier 12             model.embedding_multiplier 12.0
--residual-multiplier 0.22            model.residual_multiplier 0.22
--logits-scaling 6                    model.logits_scaling 6.0
--query-pre-attn-scalar 256           model.query_pre_attn_scalar 256.0
--attn-logit-softcapping 50           model.attn_logit_softcapping 50.0
--final-logit-softcapping 30          model.final_logit_softcapping 30.0
--scale-embeddings                    model.scale_embeddings true
--embed-layernorm                     model.embed_layernorm true
--apply-layernorm-1p                  model.apply_layernorm_1p true
--norm-placement sandwich             model.norm_placement "sandwich"
--use-parallel-residual               model.use_parallel_residual true
--parallel-residual-single-norm       model.parallel_residual_single_norm true
--disable-norm-bias                   model.disable_norm_bias true
--disable-norm-gain                   model.disable_norm_gain true
--qk-layernorm-per-head               model.qk_layernorm_per_head true
--qk-layernorm-after-rope             model.qk_layernorm_after_rope true
--xielu                               model.xielu true
--llama-4-scaling-beta 0.1            model.llama_4_scaling_beta 0.1
--geglu                               model.geglu true
--position-embedding-type alibi       model.position_embedding_type "alibi"
--fp32-residual-connection            model.fp32_residual_connection true
--apply-residual-connection-post-layernorm model.apply_residual_connection_post_layernorm true
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
--vocab-extra-ids 3                   tokenizer.vocab_extra_ids 3
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


def test_offload_needs_shards():
    assert "offload_optimizer.device" in error_of("--cpu-optimizer --zero-stage 0")


def test_no_bias_gelu_fusion_says_that_it_changes_numerics(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config_of("--no-bias-gelu-fusion")
    assert "--no-bias-gelu-fusion: the exact (erf) GELU" in caplog.text
