#!/usr/bin/env bash
# Pretrains GPT-2 with 124 million parameters on 2 machines of 8 GPUs each, under Slurm. In the clone,
#
#   sbatch --array=1-4%1 examples/slurm.sh
#
# runs four jobs, one after another. Each resumes from the previous job's checkpoint and stops by itself
# before its time limit; a job that starts after the end of training evaluates and says that training is
# complete. The clone, `data/` and `checkpoints/` must be on a file system that all machines share.
#SBATCH --job-name=gpt2_124m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
torchrun=(
    .venv/bin/torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8
    --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID"
)
model=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
    --hidden-dropout 0 --attention-dropout 0
)
data=(
    --data-path data/corpus_text_document --split 990,8,2
    --vocab-file data/vocab.json --merge-file data/merges.txt
)
training=(
    --micro-batch-size 8 --global-batch-size 512 --train-iters 100000
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --bf16 --zero-stage 1
)
output=( # stops after 11.5 of the 12 hours
    --save checkpoints/gpt2_124m --load checkpoints/gpt2_124m --save-interval 1000
    --keep-checkpoints 3 --exit-duration-in-mins 690 --exit-signal-handler
    --log-interval 10 --eval-interval 1000 --eval-iters 20 --tensorboard-dir tensorboard/gpt2_124m
)
# One task on each machine; if one of them fails, Slurm ends the others.
srun --kill-on-bad-exit=1 "${torchrun[@]}" pretrain_gpt.py \
    "${model[@]}" "${data[@]}" "${training[@]}" "${output[@]}" "$@"
