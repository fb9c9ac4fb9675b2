"""The model of a pipeline: layers, stages, ties, recomputation, compiled layers."""
