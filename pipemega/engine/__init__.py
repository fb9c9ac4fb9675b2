"""The engine: one rank of a training run.

initialize       builds an engine from a config and a model, with components
run_setup        what an engine is built from
first_plan       the plan of the first step and its stages; plan_choice chooses plans
engine           Engine: steps, checkpoints, evaluation, and the run that the config describes
checkpointed_engine  CheckpointedEngine: a StepEngine that is saved and loaded
step_engine      StepEngine: train single steps
loop_engine      LoopEngine: an Engine for a loop that runs forward and backward itself
batch_reader     micro-batches for the first and the last stage
step_runner      forwards, backwards, optimizer step; post-validation
step_callbacks   observe steps: tracing, busy time
flops_profiler   the table of `flops_profiler`; flops_report formats it
measured_stages  costs of stages for schedule "auto"; when others are worth a move
schedule_tuner   schedule "auto": measures, then changes the plan
loss             sums of the loss over micro-batches and ranks
cpu_allocator    keeps freed memory on CPUs

Of a run, whether a Trainer or the user's own loop calls `train_batch`:

training_run     TrainingRun: what follows a step: records, checks, checkpoints, the end of the run
resume           which checkpoint a run starts from
run_logger       a record for each step; events; run_stats counts them over restarts
nan_policy       training.on_nonfinite: skip, stop or roll back
timelines        files for a traced step
"""
