"""From text to batches: corpus, tokenizer, token files, samples, blends, loader.  Floor 4.

Nothing is imported here: preparing text must not load torch, and most of this room needs none.
"""
