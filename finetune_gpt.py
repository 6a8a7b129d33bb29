"""Fine-tune a GPT from --pretrained-checkpoint: `python finetune_gpt.py --help` lists the flags."""

import sys

from megatron_zpp.train.pretrain import main
from zeropp.ranks.process_group import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
