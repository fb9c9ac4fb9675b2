"""Costs and times: measured on real ranks, or counted on the meta device.

step_tracer, trace, clock_sync     times of one training step, all ranks on one clock
cost_estimation                    costs of the stages, from measured steps
simulated_vs_measured              a measured step next to its simulation
module_profiler                    FLOPs and times of the modules in a running step
meta_costs, meta_kernels, tensor_meter    costs of a stage, counted on the meta device
python_meta_kernels                what would import torch._dynamo there
"""
