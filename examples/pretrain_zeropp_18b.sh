#!/usr/bin/env bash
# Pretrains the GPT of the ZeRO++ tutorial, with 18 billion parameters, on your own text and machines with
# 16 GPUs. Run it on each machine, with the number of machines and the name of the first one:
#
#   NODES=4 FIRST=first-machine examples/pretrain_zeropp_18b.sh --save checkpoints --load checkpoints
#
# ds_zeropp_config.json keeps a copy of the weights in every 16 ranks (zero_hpz_partition_size). For
# machines with 8 GPUs, change this number to 8 and set GPUS=8. Flags that are passed to this script are
# appended and override those below. tools/preprocess_data.py creates data/corpus_text_document.bin and
# .idx from text.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

launcher=(
    torchrun --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-16}"
    --rdzv-backend c10d --rdzv-endpoint "${FIRST:-localhost}:29500"
)
tutorial=( # the tutorial's own flags
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --num-layers 40 --hidden-size 6144 --seq-length 512 --num-attention-heads 32 --batch-size 1
    --zero-stage 3 --deepspeed_config "$root/examples/ds_zeropp_config.json"
    --deepspeed-activation-checkpointing --fp16 --checkpoint-activations
)
rest=( # what the tutorial leaves open
    --data-path data/corpus_text_document --split 990,8,2
    --vocab-file data/vocab.json --merge-file data/merges.txt
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.006
    --global-batch-size 1024 --train-iters 100000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --log-interval 10 --save-interval 1000 --exit-signal-handler
)
exec "${launcher[@]}" "$root/pretrain_zeropp_gpt.py" "${tutorial[@]}" "${rest[@]}" "$@"
