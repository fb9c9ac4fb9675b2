"""The engine: one rank of a training run.

engine           Engine: the public methods
training_run     TrainingRun: what follows a step: records, checks, checkpoints, the end of the run
step_runner      StepRunner: single steps on the stages of this rank, which may move
train_step       TrainStep, StepFeature: what watches steps and the run

initialize       builds an engine from a config and a model, and loads its checkpoint
run_setup        what an engine is built from; builds the executor of any stages
engine_parts     the first plan and its stages, executor, optimizer step
plan_choice      chooses plans and cuts, on rank 0; loads the planner if a plan needs it
stage_mover      moves the stages to other ranks

evaluation       forwards only
running_statistics   BatchNorm: updates, warnings

run_logger       a record for each step; events
run              what a run is given, and what it leaves
"""
