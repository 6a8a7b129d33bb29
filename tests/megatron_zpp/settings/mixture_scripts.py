"""Flags of public launch scripts for mixtures of experts: all that they give.

Sizes and rounds of evaluation are divided, and no other processes load data. Folders, and flags
that only a fork of Megatron knows, are left out.
"""

# Of Megatron-LM for AMD's GPUs: DeepSeek-V3 with experts on ranks, without its fork's flags.
DEEPSEEK_V3 = """
--seq-length 32 --max-position-embeddings 32 --num-attention-heads 4 --hidden-size 32
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --multi-latent-attention
--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --q-lora-rank 24
--moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1
--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --qk-layernorm
--moe-ffn-hidden-size 16 --moe-layer-freq 1 --moe-shared-expert-intermediate-size 16
--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4 --num-experts 8
--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap --moe-aux-loss-coeff 1e-2
--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --kv-channels 8 --log-throughput
--no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce --lr 1e-5 --min-lr
1e-6 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad
1.0 --init-method-std 0.008 --attention-dropout 0.0 --hidden-dropout 0.0 --dataloader-type
cyclic --lr-decay-iters 3 --lr-warmup-iters 2 --train-iters 5 --micro-batch-size 1
--global-batch-size 8 --num-layers 4 --ffn-hidden-size 48 --log-interval 1 --eval-interval 10000
--eval-iters -1 --save-interval 500000 --ckpt-format torch --tensorboard-queue-size 1
--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-workers 0 --swiglu
--normalization RMSNorm --norm-epsilon 1e-06 --use-rotary-position-embeddings
--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
--rotary-base 10000 --rotary-scaling-factor 40 --transformer-impl transformer_engine
--moe-grouped-gemm --moe-use-legacy-grouped-gemm --distributed-timeout-minutes 60
--eod-mask-loss --overlap-grad-reduce --ddp-bucket-size 629145600 --overlap-param-gather
--use-distributed-optimizer --use-flash-attn --bf16
"""

# Of Pai-Megatron-Patch: DeepSeek-V3 on uneven stages, its optimizer on the host, without MTP.
DEEPSEEK_V3_STAGES = """
--seq-length 32 --max-position-embeddings 32 --num-attention-heads 4 --hidden-size 32
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-router-topk 4 --moe-router-group-topk 2
--moe-router-num-groups 4 --num-experts 8 --expert-model-parallel-size 2
--expert-tensor-parallel-size 1 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type
seq_aux_loss --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-overlap
--moe-router-enable-expert-bias --mscale 1.0 --mscale-all-dim 1.0 --moe-router-score-function
sigmoid --moe-router-bias-update-rate 0.001 --moe-aux-loss-coeff 0.001 --moe-layer-freq
([0]*3+[1]*2) --moe-shared-expert-intermediate-size 16 --q-lora-rank 24 --kv-lora-rank 16
--v-head-dim 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --lr 1e-3 --min-lr 1e-5 --lr-decay-style
cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std
0.008 --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 5 --lr-warmup-iters 1
--train-iters 5 --micro-batch-size 1 --global-batch-size 8 --num-layers 5 --ffn-hidden-size 48
--log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 1 --save-interval 5
--tensorboard-queue-size 1 --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1
--no-load-optim --no-load-rng --num-workers 0 --swiglu --normalization RMSNorm --norm-epsilon
1e-6 --use-rotary-position-embeddings --no-rope-fusion --position-embedding-type rope
--untie-embeddings-and-output-weights --disable-bias-linear --rotary-base 10000
--rotary-scaling-factor 40 --no-save-optim --kv-channels 8 --qk-layernorm
--multi-latent-attention --ckpt-format torch --transformer-impl transformer_engine
--no-masked-softmax-fusion --use-rope-scaling --split 99,1,0 --bf16 --recompute-method uniform
--recompute-num-layers 1 --recompute-granularity full --use-distributed-optimizer
--decoder-first-pipeline-num-layers 3 --attention-backend auto --optimizer-cpu-offload
--use-precision-aware-optimizer --optimizer-offload-fraction 1.0 --overlap-grad-reduce
--overlap-param-gather
"""

# Of the Swiss AI Initiative: Apertus 2 with dist_muon, without QK-clip.
APERTUS_2 = """
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --num-layers 2 --hidden-size 32
--ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 8 --normalization RMSNorm
--norm-epsilon 1e-6 --apply-layernorm-1p --swiglu --position-embedding-type rope --rotary-base
10000 --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0.0
--attention-dropout 0.0 --seq-length 32 --max-position-embeddings 4096
--make-vocab-size-divisible-by 128 --init-method-std 0.008 --multi-latent-attention
--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12
--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 3
--moe-shared-expert-intermediate-size 16 --moe-layer-freq '"([0]+[1]*1)"'
--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-load-balancing-type
seq_aux_loss --moe-router-bias-update-rate 0.001 --moe-aux-loss-coeff 0.0001
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
--optimizer dist_muon --lr 1e-3 --min-lr 1e-4 --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps
1e-8 --muon-momentum 0.95 --muon-use-nesterov --muon-scale-mode shape_scaling
--muon-extra-scale-factor 1.0 --muon-num-ns-steps 5 --weight-decay 0.1 --lr-decay-style WSD
--lr-warmup-samples 16 --lr-wsd-decay-style cosine --lr-wsd-decay-samples 0 --clip-grad 1.0
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 4
--overlap-grad-reduce --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-per-layer-logging --overlap-moe-expert-parallel-comm --no-rope-fusion
--mla-down-proj-fusion --moe-router-fusion --moe-permute-fusion --cross-entropy-loss-fusion
--cross-entropy-fusion-impl te --disable-symmetric-registration --micro-batch-size 2
--global-batch-size 8 --train-samples 40 --eval-interval 999999999 --eval-iters 0 --bf16
--attention-backend fused --transformer-impl transformer_engine --ckpt-format torch_dist
--no-check-for-nan-in-loss-and-grad --seed 41 --async-save --ckpt-fully-parallel-load
--dataloader-type single --num-workers 0 --num-dataset-builder-threads 1 --reset-position-ids
--reset-attention-mask --eod-mask-loss --log-interval 1 --log-throughput
--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-queue-size 1
--save-interval 10000000 --distributed-timeout-minutes 600 --manual-gc --manual-gc-interval 500
"""

# Of Moonlight with AdamW, for a machine of four GPUs a node.
MOONLIGHT = """
--seq-length 32 --max-position-embeddings 32 --num-attention-heads 4 --hidden-size 32
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --multi-latent-attention
--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --split 99,1,0
--num-workers 0 --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 1 --overlap-grad-reduce --overlap-param-gather
--untie-embeddings-and-output-weights --no-bias-swiglu-fusion --swiglu --use-mcore-models
--transformer-impl transformer_engine --disable-bias-linear --position-embedding-type rope
--no-rope-fusion --rotary-percent 1.0 --rotary-base 50000 --normalization RMSNorm --norm-epsilon
1e-5 --attention-backend auto --hidden-dropout 0.0 --num-layers 3 --ffn-hidden-size 64
--qk-layernorm --attention-dropout 0.0 --log-interval 1 --save-interval 200 --eval-interval 2000
--eval-iters 1 --log-throughput --log-num-zeros-in-grad --log-timers-to-tensorboard
--log-params-norm --log-straggler --disable-straggler-on-startup --straggler-minmax-count 16
--timing-log-option minmax --check-weight-hash-across-dp-replicas-interval 20000 --train-samples
40 --lr-decay-samples 39 --lr-wsd-decay-style linear --lr-wsd-decay-samples 8
--lr-warmup-samples 8 --manual-gc --ckpt-assume-constant-structure --ckpt-format torch_dist
--ckpt-fully-parallel-save --ckpt-fully-parallel-load --use-distributed-optimizer --lr 1.2e-3
--weight-decay 0.1 --lr-decay-style WSD --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
--min-lr 1.2e-5 --init-method-std 0.0198 --seed 1234 --no-create-attention-mask-in-dataloader
--bf16 --num-experts 8 --expert-model-parallel-size 4 --moe-layer-freq 1 --moe-ffn-hidden-size
16 --moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-3 --moe-router-topk 6 --moe-router-pre-softmax --moe-grouped-gemm
--moe-router-dtype fp32 --moe-router-topk-scaling-factor 2.446 --moe-router-score-function
sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-token-dispatcher-type alltoall
"""

# Of Moonlight with Muon, on two stages.
MOONLIGHT_MUON = """
--seq-length 32 --max-position-embeddings 32 --num-attention-heads 4 --hidden-size 32
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --distributed-timeout-minutes 120
--micro-batch-size 1 --global-batch-size 8 --expert-model-parallel-size 2
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1
--overlap-grad-reduce --num-experts 8 --moe-layer-freq 1 --moe-ffn-hidden-size 16
--moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-3 --moe-router-topk 6 --moe-router-pre-softmax --moe-grouped-gemm
--moe-router-dtype fp32 --moe-router-topk-scaling-factor 2.446 --moe-router-score-function
sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights
--no-bias-swiglu-fusion --swiglu --use-mcore-models --transformer-impl transformer_engine
--position-embedding-type rope --no-rope-fusion --rotary-percent 1.0 --rotary-base 50000
--normalization RMSNorm --norm-epsilon 1e-5 --multi-latent-attention --attention-backend auto
--hidden-dropout 0.0 --attention-dropout 0.0 --ckpt-format torch_dist --disable-bias-linear
--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --num-layers 4
--qk-layernorm --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router
--train-samples 40 --log-interval 1 --save-interval 100 --eval-interval 1000 --eval-iters 1
--log-throughput --timing-log-level 0 --tensorboard-log-interval 1 --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-params-norm --log-num-zeros-in-grad
--log-validation-ppl-to-tensorboard --dist-ckpt-strictness raise_unexpected --no-load-optim
--no-load-rng --use-distributed-optimizer --main-grads-dtype fp32 --main-params-dtype fp32
--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --lr 0.00015 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --optimizer muon --muon-momentum 0.95 --muon-scale-mode
spectral --muon-extra-scale-factor 0.2 --muon-no-split-qkv --clip-grad 1.0 --lr-decay-style WSD
--lr-wsd-decay-style linear --lr-wsd-decay-samples 16 --lr-warmup-samples 8 --min-lr 1.0e-5
--manual-gc --manual-gc-interval 10 --no-create-attention-mask-in-dataloader --bf16
--auto-detect-ckpt-format
"""

# Of Qwen3-30B-A3B, whose optimizer is not distributed.
QWEN3 = """
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --use-mcore-models
--transformer-impl transformer_engine --tensor-model-parallel-size 2
--pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --sequence-parallel
--legacy-tokenizer --num-layers 4 --hidden-size 32 --ffn-hidden-size 96 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 16 --qk-layernorm --seq-length 32
--max-position-embeddings 40960 --rotary-base 1000000 --rotary-percent 1.0 --micro-batch-size 2
--global-batch-size 8 --train-iters 5 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
--lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
--init-method-std 0.02 --normalization RMSNorm --disable-bias-linear --position-embedding-type
rope --no-rope-fusion --swiglu --no-bias-swiglu-fusion --untie-embeddings-and-output-weights
--bf16 --num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 4 --moe-router-dtype fp32
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type
alltoall --split 100,0,0 --ckpt-format torch --save-interval 40 --eval-interval 1000
--eval-iters 0 --log-interval 1
"""

# Of DeepSeek-V2-Lite, with experts on tensor ranks.
DEEPSEEK_V2_LITE = """
--seq-length 32 --max-position-embeddings 32 --num-attention-heads 4 --hidden-size 32
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --num-layers 3 --ffn-hidden-size 64
--kv-channels 16 --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear
--untie-embeddings-and-output-weights --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--no-masked-softmax-fusion --attention-softmax-in-fp32 --use-mcore-models
--make-vocab-size-divisible-by 32 --transformer-impl local --multi-latent-attention
--kv-lora-rank 16 --v-head-dim 8 --qk-head-dim 8 --qk-layernorm --qk-pos-emb-head-dim 4
--num-experts 8 --moe-layer-freq ([0]+[1]*2) --moe-ffn-hidden-size 16 --moe-grouped-gemm
--moe-router-score-function softmax --moe-router-topk 6 --moe-router-topk-scaling-factor 1.0
--moe-router-pre-softmax --moe-shared-expert-intermediate-size 32 --moe-aux-loss-coeff 1e-3
--moe-token-dispatcher-type alltoall --moe-token-drop-policy probs
--moe-router-load-balancing-type seq_aux_loss --position-embedding-type rope --no-rope-fusion
--rotary-percent 1.0 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 0.707
--mscale-all-dim 0.707 --micro-batch-size 1 --global-batch-size 2 --train-samples 10
--lr-decay-samples 9 --lr-warmup-samples 2 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins
235000000 --no-persist-layer-norm --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --tensor-model-parallel-size 4 --context-parallel-size 1
--pipeline-model-parallel-size 1 --sequence-parallel --tiktoken-pattern v2 --split 99,1,0
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 0 --log-interval 1
--eval-iters 1 --eval-interval 100 --save-interval 1000 --log-throughput --ckpt-format
torch_dist --distributed-timeout-minutes 120
"""

# Of Megatron-LM: Mixtral 8x7B with an expert per rank.
MIXTRAL = """
--seq-length 32 --max-position-embeddings 32 --num-attention-heads 4 --hidden-size 32
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --disable-bias-linear --num-layers 4
--ffn-hidden-size 48 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
--normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
--no-masked-softmax-fusion --no-position-embedding --no-gradient-accumulation-fusion
--num-experts 4 --expert-model-parallel-size 4 --moe-router-load-balancing-type aux_loss
--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type
alltoall --split 10000,8,2 --micro-batch-size 1 --global-batch-size 8 --adam-beta1 0.9
--adam-beta2 0.95 --lr 1e-7 --seed 42 --train-iters 5 --lr-decay-iters 4 --lr-decay-style cosine
--min-lr 1.0e-8 --weight-decay 0.1 --lr-warmup-iters 1 --clip-grad 1.0 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --log-interval 1 --save-interval 10000 --eval-interval 1000
--eval-iters 1 --no-load-optim --no-load-rng --moe-router-load-balancing-type aux_loss
"""

# Of a comparison of optimizers on Ling 2.0's shape, with dist_muon.
LING = """
--tokenizer-type NullTokenizer --vocab-size 100 --mock-data --num-layers 3 --hidden-size 32
--ffn-hidden-size 88 --moe-ffn-hidden-size 8 --num-attention-heads 4 --kv-channels 16
--group-query-attention --num-query-groups 2 --qk-layernorm --seq-length 32
--max-position-embeddings 2048 --position-embedding-type rope --rotary-percent 1.0 --swiglu
--normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --hidden-dropout 0
--attention-dropout 0 --init-method-std 0.006 --untie-embeddings-and-output-weights
--make-vocab-size-divisible-by 1 --num-experts 16 --moe-layer-freq [0]+[1]*2
--moe-shared-expert-intermediate-size 8 --moe-router-topk 8 --moe-router-load-balancing-type
none --moe-aux-loss-coeff 0 --moe-router-score-function sigmoid --moe-router-pre-softmax
--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall
--moe-grouped-gemm --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
--context-parallel-size 1 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
--transformer-impl transformer_engine --bf16 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
--lr 1.63e-3 --min-lr 1.63e-3 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1
--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --eval-iters 0 --eval-interval
1000000 --null-tokenizer-eod-id 99 --null-tokenizer-pad-id -1 --num-workers 0
--no-create-attention-mask-in-dataloader --seed 1234 --log-interval 1 --timing-log-level 2
--timing-log-option minmax --log-throughput --optimizer dist_muon --muon-momentum 0.95
--muon-nesterov --muon-num-ns-steps 5 --muon-coefficient-type quintic --muon-scale-mode spectral
--muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec medium --muon-scalar-optimizer adam
"""


MIXTURES = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_stages": DEEPSEEK_V3_STAGES,
    "apertus_2": APERTUS_2,
    "moonlight": MOONLIGHT,
    "moonlight_muon": MOONLIGHT_MUON,
    "qwen3": QWEN3,
    "deepseek_v2_lite": DEEPSEEK_V2_LITE,
    "mixtral": MIXTRAL,
    "ling": LING,
}
