"""Networks that others have trained, opened by name with their preprocessing and tokenizers."""
