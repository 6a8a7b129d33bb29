"""What the flags of Megatron ask for that is not here: what is missing, and what to do instead."""

from fnmatch import fnmatchcase

# What is missing, and the names of flags, without dashes in front; * stands for any letters.
UNAVAILABLE = (
    (
        "contexts are split over one group of ranks by --context-parallel-size, the same for all "
        "sequences",
        "hierarchical-* hybrid-context-parallel max-seqlen-per-dp-cp-rank",
    ),
    (
        "there is no mixture of experts here; leave it out to train a dense model",
        "moe-* *-moe-* num-experts* *-expert-* expert-* disable-moe* "
        "save-tokens-per-expert* use-grouped-gemm-for-shared-expert ep-overlap-* "
        "high-priority-a2a-* overlap-dispatch-backward-with-*",
    ),
    (
        "there is no computing in 8 or 4 bits here; leave it out, and give --bf16",
        "fp8-* fp4-* *-fp8-* disable-fp8-* no-fp8-* te-precision-config-file keep-fp8-* "
        "reuse-grad-buf-for-* use-kitchen-* kitchen-*",
    ),
    (
        "there is no knowledge distillation here; leave it out to train on the text alone",
        "kd kd-* load-teacher mos *-teacher logits-*",
    ),
    (
        "there is no reinforcement learning here; train on prompts and answers with --data-path "
        "FILE.jsonl",
        "rl-* no-rl-* grpo-* langrl-* perform-rl-step refit-method "
        "use-same-sampling-seed-across-dp-ranks",
    ),
    (
        "examples for fine-tuning are read from --data-path FILE.jsonl, without this flag",
        "sft sft-* per-dataset-sequences-path",
    ),
    (
        "there are no state-space layers and no linear attention here; every layer is a "
        "transformer block",
        "mamba-* *-mamba-* hybrid-* is-hybrid-model linear-* gdp-*",
    ),
    (
        "there is no multi-token prediction here; leave it out to predict the next token",
        "mtp-*",
    ),
    (
        "there are no BERT models here, only GPT",
        "mask-prob short-seq-prob output-bert-* bert-no-binary-head no-data-sharding "
        "max-tokens-to-oom head-lr-mult",
    ),
    (
        "there is no retrieval here",
        "retro-* retriever-* ict-* bert-* biencoder-* query-in-block-prob evidence-data-path "
        "indexer-* block-data-path embedding-path titles-data-path use-one-sent-docs",
    ),
    (
        "there are no encoder-decoder models here, only GPT: --seq-length and --num-layers say "
        "its size",
        "decoder-seq-length decoder-num-layers pipeline-model-parallel-split-rank",
    ),
    (
        "there are no models of images here, only GPT",
        "img-* patch-dim num-channels num-classes vision-* swin-* dino-* iter-per-epoch "
        "classes-fraction mask-type mask-factor data-per-class-fraction sample-rate",
    ),
    (
        "there is no data-efficiency library here, neither curricula nor token dropping; leave "
        "it out to take all tokens in the order of --dataloader-type",
        "data-efficiency-* random-ltd* train-idx-path train-desc-path "
        "train-doc-idx-path train-sample-idx-path train-shuffle-idx-path "
        "train-data-exact-num-epochs return-data-index",
    ),
    (
        "data that is used up is repeated with --dataloader-type cyclic",
        "repeated-dataloader",
    ),
    (
        "the data is read by this program alone, from where --data-path says",
        "use-dataset-only aml-data-download-path",
    ),
    (
        "there is no filling in the middle here; leave it out to train from left to right",
        "fim-*",
    ),
    (
        "a tokenizer is what its files say; --tokenizer-type HuggingFaceTokenizer reads a "
        "tokenizer.json, and a tokenizer_config.json beside it",
        "tokenizer-metadata tokenizer-special-tokens tokenizer-hf-* "
        "*tokenizer-sentencepiece-* chat-template",
    ),
    (
        "the NullTokenizer has the ids below --vocab-size, of which the last ends a document",
        "null-tokenizer-*",
    ),
    (
        "a pass does not divide a sequence into chunks here; --context-parallel-size divides it "
        "over ranks, and --recompute-granularity full keeps less",
        "ds-sequence-parallel-fpdt* mlp-chunks-* enable-chunked-prefill",
    ),
    (
        "there is no multi-latent attention here; leave it out for multi-head attention, or "
        "give --group-query-attention",
        "multi-latent-attention *-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale* "
        "cache-mla-latents mla-*",
    ),
    (
        "only the optimizer Adam with decoupled weight decay is available; leave it out",
        "muon-* lion-* sgd-*",
    ),
    (
        "weights are not rescaled where scores grow; --qk-layernorm normalizes queries and keys, "
        "and --attn-logit-softcapping caps the scores",
        "qk-clip*",
    ),
    (
        "it is a part of models that are not here; docs/models.md lists those that are",
        "glu-* activation-func-* quick-geglu qk-l2-norm rotary-interleaved mrope-* "
        "relative-attention-* attention-output-gate experimental-attention-* dsa-* no-dsa-* "
        "disable-dsa-* mhc-* enable-mhc-* heterogeneous-* spec",
    ),
    (
        "matrices are drawn from a normal distribution with the deviation --init-method-std, and "
        "the learning rate is the same for every width",
        "embedding-init-* init-method-xavier-* mup-* use-mup",
    ),
    (
        "all weights are trained, or with --lora-rank the adapters alone; --skip-train trains none",
        "freeze-all-layers",
    ),
    (
        "all weights are kept in fp32, and computed with in the format of --bf16 or --fp16",
        "embedding-weights-in-fp32",
    ),
    (
        "the kernels of attention do not return the scores",
        "log-max-attention-logit",
    ),
    (
        "the kernels are PyTorch's own: --deterministic-mode takes deterministic ones only",
        "batch-invariant-*",
    ),
    (
        "activations are not moved to the host here; --recompute-granularity full keeps fewer, "
        "and ZeRO-Offload (offload_optimizer in the JSON) moves the optimizer",
        "cpu-offloading-* fine-grained-* offload-modules activation-offload-* delay-offload-* "
        "delta-offload-* min-offloaded-*",
    ),
    (
        "layers are divided equally; --decoder-first-pipeline-num-layers and "
        "--decoder-last-pipeline-num-layers give the ends others",
        "account-for-* pipeline-model-parallel-layout standalone-embedding-stage",
    ),
    (
        "weights are sharded by --zero-stage 3 and by --tensor-model-parallel-size here",
        "gtp-* *-num-weight-shards enable-full-sharding-in-hsdp",
    ),
    (
        "checkpoints are written to --save alone; --save-interval says how often and "
        "--keep-checkpoints how many stay, and --async-save writes beside training",
        "replication* non-persistent-*",
    ),
    (
        "tools/convert_hf.py converts checkpoints of other programs: --from-checkpoint reads them, "
        "and --to-megatron writes Megatron-LM's",
        "ckpt-convert-*",
    ),
    (
        "--ckpt-step says which checkpoint of --load is taken, by its iteration, and "
        "--reset-iteration counts from 0",
        "load-tag override-ckpt-iteration",
    ),
    (
        "checkpoints and data are in folders of the file system, not in an object store",
        "*-msc object-storage-*",
    ),
    (
        "the batch of an evaluation is that of training",
        "eval-global-batch-size eval-micro-batch-size",
    ),
    (
        "there is one validation set, of which --eval-iters batches are taken every "
        "--eval-interval iterations",
        "multiple-validation-sets full-validation validation-set-names start-eval-at-iter",
    ),
    (
        "batches are left out by their samples, with --skip-samples A:B",
        "iterations-to-skip",
    ),
    (
        "the batch must be divisible: give another --global-batch-size",
        "decrease-batch-size-*",
    ),
    (
        "the batch size changes with --rampup-batch-size or --step-batch-size-schedule",
        "phase-transition-iterations",
    ),
    (
        "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by, not to a size",
        "padded-vocab-size",
    ),
    (
        "no weights, activations or gradients are written to files for analysis",
        "save-activations-interval save-dgrads-interval save-params-interval "
        "save-wgrads-interval dump-param-*",
    ),
    (
        "a run's settings are in state.json of its checkpoints, and on TensorBoard's page of texts",
        "config-logger-dir",
    ),
    (
        "memory is reported by --log-memory-to-tensorboard, and a trace by --profile",
        "record-memory-history memory-snapshot-path",
    ),
    (
        "power is not measured",
        "log-energy",
    ),
    (
        "--profile-step-start and --profile-step-end say which iterations --profile traces",
        "profile-steps",
    ),
    (
        "--reset-attention-mask ends attention at the end of a document",
        "dataloader-inter-*",
    ),
    (
        "models are exported to Hugging Face folders, with tools/convert_hf.py --to-hf",
        "onnx-*",
    ),
    (
        "products in bf16 are summed as PyTorch does by default",
        "disable-bf16-reduced-*",
    ),
    (
        "NCCL's flight recorder is switched on with PyTorch's TORCH_NCCL_TRACE_BUFFER_SIZE",
        "*-flight-recorder-* flight-recorder-*",
    ),
    (
        "no faults are made on purpose here",
        "fault-injector-* error-injection-*",
    ),
    (
        "copies of a weight are made anew from its one owner after each step; the copies that "
        "steps of codes keep are compared by weight_step_check_interval of the JSON",
        "check-weight-hash-*",
    ),
    (
        "no step is computed twice to compare the results",
        "result-rejected-*",
    ),
    (
        "the devices are not tested during a run; a rank that hangs is named with its line of code",
        "gpu-sniff-* run-workload-* test-mode",
    ),
    (
        "--dry-run and megatron-zpp plan say what a run on ranks that are not at hand needs",
        "fake-process-group",
    ),
    (
        "flags are read from the command line, and DeepSpeed's JSON from --deepspeed-config",
        "yaml-cfg",
    ),
    (
        "a run ends by SIGTERM, which saves first with --exit-signal-handler, or by "
        "--exit-interval or --exit-duration-in-mins",
        "kill-switch-file",
    ),
    (
        "there is no inference engine here: export the model with tools/convert_hf.py --to-hf, "
        "and serve it with vLLM",
        "inference* no-inference-* *-prefill use-legacy-static-engine num-speculative-tokens "
        "flash-decode decode-only-* ds-inference nccl-all-reduce-for-* "
        "output-logit-dtype",
    ),
)


def what_is_missing(name: str) -> str:
    """What a flag of Megatron's would need and what to do, "" for any other name without dashes."""
    for missing, patterns in UNAVAILABLE:
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return missing
    return ""
