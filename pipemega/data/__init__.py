"""Data: micro-batches of one data rank.

loader           BatchLoader: steps, position, state
sample_reader    order, random numbers, reading and collating of samples
sample_sources   map-style and iterable datasets; torch_loader: DataLoaders
read_ahead       threads or worker processes
tokens/          text -> tokens -> Megatron's token files -> samples
finetuning/      conversations and examples
images/          files, datasets, transforms

Imports nothing: text can be prepared without torch.
"""
