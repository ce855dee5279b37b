"""The language model of `openrnn train`: bytes in, the next byte out."""
