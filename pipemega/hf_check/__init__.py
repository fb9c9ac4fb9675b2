"""`pipemega hf check`: compares a Hugging Face model on several ranks with the unsplit model.

shrink           a small config of the same family
random_batch     plain, padded and packed samples
reference        loss and gradients of transformers' own model
split_run        loss and gradients of the split model, on the ranks that `rank_processes` starts
comparison       of all gradients
model_check      CheckResult; report prints it
float64          no casts to float32, so that results in float64 are exact
"""
