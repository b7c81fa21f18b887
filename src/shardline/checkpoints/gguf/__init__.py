"""GGUF files, the checkpoints of llama.cpp: headers, names, configuration and tokenizer. Nothing here needs torch."""
