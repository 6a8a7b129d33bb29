"""The families of Hugging Face models that our GPT can be: their settings and weights, as rows."""
