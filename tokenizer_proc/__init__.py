"""Text to ids and back: chat templates, encoding with a segment cache, block keys, detokenising, stop strings."""
