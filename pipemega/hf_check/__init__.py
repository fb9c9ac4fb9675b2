"""`pipemega hf check`: compares a Hugging Face model on several ranks with the unsplit model.

shrink           a small config of the same family
split_run        loss and gradients of the split model and of transformers' own, on random batches
model_check      compares all gradients
check_report     prints the result; the table of families
"""
