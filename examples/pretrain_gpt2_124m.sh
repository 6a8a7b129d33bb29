#!/usr/bin/env bash
# Pretrains GPT-2 with 124 million parameters on your own text, on all GPUs of this machine. Flags that
# are passed to this script are appended and override those below:
#
#   examples/pretrain_gpt2_124m.sh --micro-batch-size 4 --train-iters 20000
#
# tools/preprocess_data.py creates data/corpus_text_document.bin and .idx from text.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

model=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
    --hidden-dropout 0 --attention-dropout 0
)
data=(
    --data-path data/corpus_text_document --split 990,8,2
    --vocab-file data/vocab.json --merge-file data/merges.txt
)
training=( # 512 x 1024 tokens per step, 52 billion in total
    --micro-batch-size 8 --global-batch-size 512 --train-iters 100000
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --bf16 --zero-stage 1
)
output=(
    --save checkpoints/gpt2_124m --load checkpoints/gpt2_124m --save-interval 1000
    --keep-checkpoints 3 --exit-signal-handler
    --log-interval 10 --eval-interval 1000 --eval-iters 20 --tensorboard-dir tensorboard/gpt2_124m
)
exec zeropp "$root/pretrain_gpt.py" \
    "${model[@]}" "${data[@]}" "${training[@]}" "${output[@]}" "$@"
