"""Adapter files: what a LoRA adapter is, how it is written for PEFT and for llama.cpp, and how it is published on disk.

    shape, weights, errors              the values: a base model's shape, an adapter's matrices, what can be wrong
    peft, gguf_header, llamacpp_format  the file formats
    manifest, folder, store, base_file  hashes, complete folders, durable publishing

Imports numpy, safetensors, gguf and the standard library, and no other package of ours: daemon and workers both build
on it."""
