"""Import and export of models: Hugging Face folders, .gguf files and PEFT adapters."""
