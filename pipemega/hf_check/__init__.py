"""`pipemega hf check`: compares a Hugging Face model on several ranks with the unsplit model.

float64          no casts to float32, so that results in float64 are exact
shrink           a small config of the same family
"""
