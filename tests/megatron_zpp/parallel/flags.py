"""Flags of the models that several ranks train like one, and of how they share the work."""

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
LENGTH = "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 "
GPT2 = NO_DROPOUT + LENGTH
LLAMA = (
    GPT2 + "--swiglu --normalization RMSNorm --position-embedding-type rope --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --reset-attention-mask "
    "--reset-position-ids --eod-mask-loss "
)
ONE_GROUP = "--num-query-groups 1 "  # fewer than ranks that split each matrix
DEEP = "--num-layers 4 --global-batch-size 8 "
DEEP_GPT2, DEEP_LLAMA = GPT2 + DEEP, LLAMA + DEEP

TP2, TP4 = (f"--tensor-model-parallel-size {size} " for size in (2, 4))
SP = "--sequence-parallel "
CP2, CP4 = (f"--context-parallel-size {size} " for size in (2, 4))
GATHERED = "--cp-comm-type allgather "
PP2, PP4 = (f"--pipeline-model-parallel-size {size} " for size in (2, 4))
TWO_STAGES = "--num-virtual-stages-per-pipeline-rank 2 "
EP1, EP2, EP4 = (f"--expert-model-parallel-size {size} " for size in (1, 2, 4))
