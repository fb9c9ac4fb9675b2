"""LoRA: trains low-rank adapters of linear layers on any mesh, with the other weights frozen.

`add_lora`: the model with adapters; `targets`: which linears get one; `low_rank`: the adapter of
one linear; `peft_files`: adapters in peft's format; `merging`: W + scale B A.
"""
