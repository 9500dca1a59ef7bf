"""The packaged model as transformers loads it from its GGUF file, written once as a folder that peers load.

`python peer_model.py MODEL.gguf FOLDER`. Loading a GGUF file through transformers takes longer than an update, and the
peers that people run hold plain weights; so unpacking stays out of every measured time, as it does for this engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def write_peer_model(gguf: Path, folder: Path) -> None:
    """Model (float32, dequantised) and tokenizer of `gguf` in `folder`, which appears by rename."""
    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    temporary = folder.with_name(folder.name + ".tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


if __name__ == "__main__":
    write_peer_model(Path(sys.argv[1]), Path(sys.argv[2]))
