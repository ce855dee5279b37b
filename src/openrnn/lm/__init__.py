"""The language models of `openrnn train`: bytes or words in, the next one out."""
