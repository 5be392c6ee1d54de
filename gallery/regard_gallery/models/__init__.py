"""Models with real weights, from packages and local files: text, sentences and speech."""
