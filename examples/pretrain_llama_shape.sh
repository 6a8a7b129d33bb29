#!/usr/bin/env bash
# Pretrains a model in the shape of Llama, with 1.1 billion parameters, on your own text and all GPUs of
# this machine. Flags that are passed to this script are appended and override those below:
#
#   examples/pretrain_llama_shape.sh --tokenizer-model data/tokenizer.json --micro-batch-size 1
#
# tools/preprocess_data.py creates data/corpus_text_document.bin and .idx from text.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

model=(
    --num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --seq-length 2048
    --normalization RMSNorm --swiglu --position-embedding-type rope --rotary-base 10000
    --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
data=(
    --data-path data/corpus_text_document --split 990,8,2
    --tokenizer-type HFTokenizer --tokenizer-model data/tokenizer.json
)
training=( # 512 x 2048 tokens per step, 105 billion in total; the learning rate decays in the last tenth
    --micro-batch-size 4 --global-batch-size 512 --train-iters 100000
    --lr 4e-4 --min-lr 4e-5 --lr-warmup-iters 2000
    --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 10000
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --bf16 --zero-stage 3 --recompute-granularity full --recompute-method uniform
)
output=(
    --save checkpoints/llama_shape --load checkpoints/llama_shape --save-interval 1000
    --keep-checkpoints 3 --exit-signal-handler
    --log-interval 10 --eval-interval 1000 --eval-iters 20 --tensorboard-dir tensorboard/llama_shape
)
exec zeropp "$root/pretrain_gpt.py" \
    "${model[@]}" "${data[@]}" "${training[@]}" "${output[@]}" "$@"
