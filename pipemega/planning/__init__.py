"""Predicts memory, bubble, time and traffic of a run from its config, without starting it.

run_checks        ranks, batch, schedule and files of a config, what "auto" means; without torch
estimate          config -> Report; calls the modules below
stage_costs       costs of stages and layers, counted on the meta device; the model of a config
meta_model        the stages of a model on the ranks of a mesh
memory            weights, gradients and optimizer state of a rank
memory_timeline   activations and messages of a rank during a step
schedule_choice   the plan of schedule `auto`; `engine` uses it too
prediction        FLOPs and bytes -> times; the result for one schedule
advice            changes that were tried: what makes the run fit, or faster
report            the report for a terminal, a script, a picture
"""
