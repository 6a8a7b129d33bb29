"""Models from elsewhere, in and out: Hugging Face's folders, .gguf files, PEFT adapters."""
