"""Data to fine-tune on: conversations, instructions and texts become packed or padded samples."""
