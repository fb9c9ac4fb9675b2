"""Diagnostics of a running training.

nan_origin      finds the layer and micro-batch in which inf or nan first appeared
replica_check   compares the replicas of parameters bitwise
stragglers      finds ranks that are slower than others with the same work, and jumps of the loss
"""
