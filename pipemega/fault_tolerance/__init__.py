"""Failure handling of a run.

run                 `pipemega.run`, the context manager around a training script; order of exits
error_propagation   FailureReporter: publishes an error once and ends all ranks
failure_store       the failure reports in the store of the process group; SIGTERM of the launcher
final_report        one rank prints the error, every rank logs its details
watchdog            reports where a hanging rank is, and ends it
preemption          StopRequest: signals and the time limit
"""
