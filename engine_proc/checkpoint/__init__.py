"""Getting a model folder: embedded models, GGUF files and Hugging Face folders, without any tensor library."""
