"""Predicts memory, bubble, time and traffic of a run from its config, without starting it.

run_checks        ranks, batch, schedule and files of a config; without torch
resolved          what "auto" and null resolve to; without torch
estimate          config -> Report; calls the modules below
model_source      the model and one micro-batch, on the meta device
meta_model        its stages on the ranks of a mesh, with measured costs
footprint         weights, gradients and optimizer state of a rank
memory_timeline   activations and messages of a rank during a step
rates             FLOPs and bytes -> times
layer_times       measured times of stages -> times of the stages of another cut
schedule_choice   the plan of schedule `auto`; `engine` uses it too
prediction        the result for one schedule
advice            warnings, recommendation, changes that make the run fit
report_text, report_json, panels    the report for a terminal, a script, a picture
units             sizes as text
"""
