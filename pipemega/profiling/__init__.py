"""Costs and times, measured on real ranks.

step_tracer      selects and times training steps; step_trace has all ranks on one clock
measured_costs   costs of the stages, from measured steps; a measured step next to its simulation
module_profiler  FLOPs and times of the modules in a running step
flops_profile    the table of `flops_profiler`, made of them
communication    the table of `comms_logger`
"""
