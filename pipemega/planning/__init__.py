"""Predicts memory, bubble, time and traffic of a run from its config; chooses plans by that.

run_checks        ranks, batch, schedule and files of a config, what "auto" means; without torch
estimate          config -> Report; calls the modules below
meta_model        the stages of a model on the ranks of a mesh; the model of a config
memory            weights, gradients and optimizer state of a rank
memory_timeline   activations and messages of a rank during a step
schedule_choice   the plan of schedule `auto`
planner           plans of a run that need bytes, a search or measured times
schedule_tuner    schedule `auto` in a run: measures, then changes the plan
prediction        FLOPs and bytes -> times; the result for one schedule
advice            changes that were tried: what makes the run fit, or faster
report            the report for a terminal, a script, a picture
"""
