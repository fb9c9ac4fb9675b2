"""Token files: reading, writing, blending, preparing, tokenizers."""
