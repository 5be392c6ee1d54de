"""Pretrained models from packages and local files, for text, sentence embeddings and speech."""
