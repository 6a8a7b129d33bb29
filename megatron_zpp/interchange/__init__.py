"""Models of other programs, in and out: Hugging Face, PEFT, .gguf files, Megatron, DeepSpeed."""
