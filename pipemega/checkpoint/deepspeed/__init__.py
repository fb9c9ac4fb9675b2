"""Weights of checkpoints that DeepSpeed wrote.

deepspeed_folder.py   finds the checkpoint in a folder, and reads tensors from its files
shard_rules.py        how tensor-parallel shards form a tensor
deepspeed_weights.py  all weights of a checkpoint, by DeepSpeed's names
weights_loading.py    loads them into a run, or writes them as a checkpoint of pipemega
"""
