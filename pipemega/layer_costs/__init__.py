"""The costs of layers, counted on the meta device, and the cut of a model by them.

tensor_meter    bytes, FLOPs and kernels of tensor operations on the meta device; the table of rates
stage_costs     costs of stages and layers for one micro-batch
counted_model   the layers of a model on a mesh: their costs, their cut; FLOPs of a model
"""
