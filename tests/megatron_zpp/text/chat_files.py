"""The files of a byte-level tokenizer with a chat template, as Hugging Face stores them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|begin|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}\n"
    "<|begin|>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|begin|>assistant\n{% endif %}"
)


def write_chat_files(folder: Path, template: str = TEMPLATE) -> dict[str, int]:
    """Write them; returns the vocabulary, 256 bytes and the 2 special tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<|end|>"}
    config = {"eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab(with_added_tokens=True)
