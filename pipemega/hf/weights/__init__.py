"""Weights in the format of Hugging Face: reading by slices, export, import."""
