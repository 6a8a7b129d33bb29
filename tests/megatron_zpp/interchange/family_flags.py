"""The flags that make our GPT one of the models in `foreign_models.py`, but for its sizes."""

ROTARY = "--position-embedding-type rope "
UNTIED = "--untie-embeddings-and-output-weights "
RMS = "--swiglu --normalization RMSNorm --disable-bias-linear "
LLAMA = ROTARY + UNTIED + RMS + "--num-query-groups 2 "
SMALL_EPSILON = "--norm-epsilon 1e-6 "
WINDOW = "--window-size 6,0 "
OLMO = LLAMA + "--norm-placement post --qk-layernorm --qk-layernorm-across-heads "
GEMMA = (
    ROTARY + SMALL_EPSILON + WINDOW + "--geglu --normalization RMSNorm --disable-bias-linear "
    "--num-query-groups 2 --kv-channels 10 --apply-layernorm-1p --norm-placement sandwich "
    "--scale-embeddings --query-pre-attn-scalar 12 "
)
FLAGS = {
    "llama, bias in attention, GeGLU, linear scaling by 2.5": LLAMA.replace("--swiglu", "--geglu")
    + SMALL_EPSILON + "--no-bias-gelu-fusion --add-qkv-bias --add-attention-output-bias "
    "--rotary-base 500.5 --rotary-seq-len-interpolation-factor 2.5 ",
    "mistral": LLAMA + SMALL_EPSILON + WINDOW,
    "qwen2": LLAMA + SMALL_EPSILON + "--add-qkv-bias ",
    "qwen3": LLAMA + SMALL_EPSILON + "--qk-layernorm --kv-channels 10 ",
    "qwen3, yarn": LLAMA + SMALL_EPSILON + "--qk-layernorm --kv-channels 10 --rotary-base 500 "
    "--rope-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 40 "
    "--yarn-attention-factor 1.138629436111989 ",
    "phi3, a window, a part rotated, tied": ROTARY + RMS + WINDOW
    + "--rotary-percent 0.75 --rotary-base 100 ",
    "phi3, long factors": LLAMA + "--kv-channels 6 --rotary-base 500 "
    "--longrope-short-factors 1 1.1 1.25 --longrope-long-factors 1.5 3 7 "
    "--longrope-original-positions 16 --longrope-attention-factor 1.1816262629022296 ",
    "olmo2": OLMO,
    "olmo3": OLMO + WINDOW + "--window-attn-skip-freq 4 --rotary-base 500000 --num-layers 4 ",
    "smollm3": LLAMA + SMALL_EPSILON + "--no-rope-freq 2 --num-layers 4 --rotary-base 2000000 ",
    "gemma2": GEMMA + "--attn-logit-softcapping 2 --final-logit-softcapping 3 "
    "--window-attn-skip-freq 2 ",
    "gemma3": GEMMA + "--qk-layernorm --rotary-base-local 100 --rotary-base 5000 --num-layers 4 "
    "--rotary-seq-len-interpolation-factor 8 --window-attn-skip-freq [1,0]*2 ",
    "gpt_neox, parallel": ROTARY + UNTIED + "--use-parallel-residual --no-bias-gelu-fusion "
    "--rotary-base 500 ",
    "gpt_neox, bias in the MLP, ReLU, linear scaling": ROTARY + UNTIED + "--disable-bias-linear "
    "--add-mlp-bias --relu --rotary-base 500 "
    "--rotary-seq-len-interpolation-factor 1.5 ",
    "bloom": "--position-embedding-type alibi --embed-layernorm ",
}  # fmt: skip
