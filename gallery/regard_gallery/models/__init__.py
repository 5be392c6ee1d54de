"""Models with pretrained weights, from packages and local files: text, sentences and speech."""
