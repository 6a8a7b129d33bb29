# make help lists the targets. Variables: PYTHON (which Python makes .venv), TORCH (the version to
# install if that Python has no torch of 2.11 or newer; given by hand, that version and no other),
# RANKS, ARGS (further arguments of pytest or of pretrain_gpt.py).
PYTHON ?= python3
TORCH ?= 2.13.0
RANKS ?= 4
ARGS ?=

EXACT := $(if $(filter file,$(origin TORCH)),,--exact)
DONE := .venv/.setup-done$(if $(EXACT),-torch-$(TORCH))

# What `make pretrain` trains: a small GPT on the text of Python's own standard library.
PRETRAIN := \
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
    --micro-batch-size 4 --global-batch-size 16 --train-iters 300 \
    --zero-stage 3 --bf16 --lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --log-interval 10 --eval-interval 100 --eval-iters 5 \
    --save runs/pretrain/checkpoint --load runs/pretrain/checkpoint --save-interval 100 \
    --tensorboard-dir runs/pretrain/tensorboard

.DEFAULT_GOAL := help
.PHONY: help setup test pretrain clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(DONE) ## make .venv with everything in it (instant the second time)

test: setup ## run the tests (ARGS="-k name" chooses)
	.venv/bin/python -m pytest $(ARGS)

pretrain: setup ## train a small GPT on RANKS ranks under ZeRO-3; resumes where it was stopped
	.venv/bin/zeropp --num_ranks $(RANKS) pretrain_gpt.py $(PRETRAIN) $(ARGS)

clean: ## remove .venv, caches and build products; runs/ stays
	rm -rf .venv .cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DONE): pyproject.toml setup.py tools/make_environment.py
	$(PYTHON) tools/make_environment.py --torch $(TORCH) $(EXACT)
	@touch $@
