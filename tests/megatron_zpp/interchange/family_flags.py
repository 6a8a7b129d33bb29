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
EXPERTS = "--num-experts 4 "
SHARED = "--moe-shared-expert-intermediate-size "
DEEPSEEK = (
    ROTARY + UNTIED + RMS + SMALL_EPSILON + "--multi-latent-attention --q-lora-rank 12 "
    "--kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm "
    "--num-experts 8 --moe-router-topk 3 --moe-layer-freq [0,1] --moe-ffn-hidden-size 24 "
    "--moe-router-topk-scaling-factor 2 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-dtype fp32 " + SHARED + "48 "
)
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
GATED = "--swiglu --disable-bias-linear --num-query-groups 2 "
LAYER_NORM = ROTARY + UNTIED + "--num-query-groups 2 "
COHERE = (
    ROTARY + GATED + "--rotary-interleaved --disable-norm-bias --use-parallel-residual "
    "--parallel-residual-single-norm --logits-scaling 1.25 "
)
GLM = LLAMA + "--rotary-interleaved --add-qkv-bias --rotary-percent 0.5 --kv-channels 8 "
QK_NORM = "--qk-layernorm "
FALCON = ROTARY + "--disable-bias-linear --no-bias-gelu-fusion --use-parallel-residual "
FLAGS_OF_DENSE = {
    "seed_oss, other biases": ROTARY + RMS + SMALL_EPSILON + "--num-query-groups 2 "
    "--kv-channels 8 --add-attention-output-bias --add-mlp-bias ",
    "ministral3": LLAMA + "--kv-channels 10 --rotary-base 500 --rope-type yarn "
    "--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 12 --yarn-beta-fast 3 "
    "--llama-4-scaling-beta 0.3 ",
    "granite": LLAMA + SMALL_EPSILON + "--embedding-multiplier 6 --residual-multiplier 0.22 "
    "--query-pre-attn-scalar 11.1111111111 --logits-scaling 1.5 ",
    "glm": GLM + "--norm-epsilon 1.5625e-7 ",
    "glm4": GLM + "--norm-epsilon 1.5625e-7 --norm-placement sandwich ",
    "cohere, norms of heads, untied": COHERE.replace("1.25", "1.42857142857") + UNTIED + QK_NORM
    + "--qk-layernorm-per-head --add-qkv-bias --add-attention-output-bias --rotary-base 500000 ",
    "cohere2": COHERE + WINDOW + "--window-attn-skip-freq 4 --no-rope-freq 4 --num-layers 4 ",
    "starcoder2": ROTARY + "--num-query-groups 2 ",
    "exaone4": LLAMA + WINDOW + QK_NORM + "--norm-placement post --num-layers 4 "
    "--window-attn-skip-freq 4 --no-rope-freq 4 ",
    "olmo": ROTARY + UNTIED + GATED + "--disable-norm-gain ",
    "gemma": ROTARY + SMALL_EPSILON + "--geglu --normalization RMSNorm --disable-bias-linear "
    "--num-query-groups 2 --kv-channels 10 --apply-layernorm-1p --scale-embeddings ",
    "nemotron": LAYER_NORM + "--disable-bias-linear --squared-relu --apply-layernorm-1p "
    "--rotary-percent 0.5 --kv-channels 8 ",
    "falcon": FALCON + "--num-query-groups 1 --parallel-residual-single-norm ",
    "falcon 40b": FALCON + "--num-query-groups 2 ",
    "stablelm, norms of heads, parallel": ROTARY + GATED + QK_NORM + "--qk-layernorm-per-head "
    "--rotary-percent 0.4 --rotary-base 100 --add-qkv-bias --use-parallel-residual "
    "--parallel-residual-single-norm ",
    "ernie4_5": ROTARY + RMS + "--rotary-interleaved --kv-channels 10 --num-query-groups 2 "
    "--rotary-base 500000 ",
    "hunyuan_v1_dense": LLAMA + QK_NORM + "--qk-layernorm-after-rope --kv-channels 10 ",
    "apertus": LAYER_NORM + "--disable-bias-linear --normalization RMSNorm --qk-layernorm "
    "--xielu --rotary-base 12000000 --use-rope-scaling ",
    "helium": LLAMA + "--norm-epsilon 1e-8 --rotary-interleaved --rotary-base 100000 ",
    "nanochat": LAYER_NORM + SMALL_EPSILON + "--disable-bias-linear --normalization RMSNorm "
    "--squared-relu --disable-norm-gain --embed-layernorm --qk-layernorm "
    "--final-logit-softcapping 15 ",
}  # fmt: skip
LARGE = "--init-method-std 0.3 "  # so that gradients of a few numbers count in the norm of all
FLAGS_OF_PIECES = {  # those of dense families that no family above has, some of them at once
    "norms of heads, one norm": LARGE + FLAGS_OF_DENSE["cohere, norms of heads, untied"],
    "no gains, scaled queries, norms after rotary": LARGE
    + FLAGS_OF_DENSE["nanochat"]
    + "--qk-layernorm-after-rope --rope-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 12 --llama-4-scaling-beta 0.3 ",
    "apertus": LARGE + FLAGS_OF_DENSE["apertus"],
}
FLAGS_OF_MIXTURES = {
    "mixtral": LLAMA + EXPERTS + "--rotary-base 1000000 ",
    "qwen2_moe": LLAMA + SMALL_EPSILON + EXPERTS + "--moe-ffn-hidden-size 24 --add-qkv-bias "
    "--moe-router-pre-softmax --moe-shared-expert-gate " + SHARED + "20 ",
    "qwen3_moe": LLAMA + SMALL_EPSILON + EXPERTS + "--moe-ffn-hidden-size 24 --qk-layernorm "
    "--kv-channels 10 ",
    "olmoe": ROTARY + UNTIED + RMS + "--num-query-groups 2 --qk-layernorm "
    "--qk-layernorm-across-heads --moe-router-pre-softmax " + EXPERTS,
    "granitemoe": LLAMA + SMALL_EPSILON + EXPERTS + "--embedding-multiplier 6 "
    "--residual-multiplier 0.22 --query-pre-attn-scalar 11.1111111111 --logits-scaling 1.5 ",
    "deepseek_v2": DEEPSEEK + "--moe-router-pre-softmax --moe-router-group-best 1 ",
    "deepseek_v3": DEEPSEEK + SIGMOID + "--moe-router-group-best 2 ",
    "deepseek_v3, yarn, a bias": DEEPSEEK + SIGMOID + "--moe-router-group-best 2 --add-qkv-bias "
    "--add-attention-output-bias --rotary-base 500 --rotary-scaling-factor 4 --mscale 0.7 "
    "--mscale-all-dim 0.9 --yarn-original-max-position-embeddings 12 ",
    "glm4_moe": LLAMA + SIGMOID + SHARED + "24 --moe-ffn-hidden-size 24 --num-experts 8 "
    "--moe-router-topk 3 --moe-layer-freq [0,1] --moe-router-topk-scaling-factor 2.5 "
    "--rotary-percent 0.5 --kv-channels 12 --qk-layernorm --add-qkv-bias --moe-router-dtype fp32 ",
    "minimax_m2": LLAMA + SIGMOID + SMALL_EPSILON + EXPERTS + "--qk-layernorm --kv-channels 8 "
    "--qk-layernorm-across-heads --rotary-percent 0.5 --rotary-base 5000000 "
    "--moe-router-dtype fp32 ",
    "gpt_oss": ROTARY + UNTIED + EXPERTS + WINDOW + "--normalization RMSNorm --quick-geglu "
    "--num-query-groups 2 --kv-channels 8 --window-attn-skip-freq 2 --softmax-type learnable "
    "--activation-func-clamp-value 0.7 --glu-linear-offset 1 --rotary-base 150000 --rope-type yarn "
    "--rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096 "
    "--yarn-attention-factor 1.3465735902799727 --no-yarn-correction-range-round-to-int ",
}  # fmt: skip
