"""What a run is given, and what it leaves.

run_arguments    checks of the arguments, mesh, determinism, logs of ranks
training_data    the loader of the training data, and the length of the run
batch_reader     micro-batches for the first and the last stage

run_folder       the folder of a run, its lock, facts about the run
run_history      what is due after a step, times and counters over restarts, training.on_nonfinite
"""
