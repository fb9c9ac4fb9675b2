"""Failure handling of a run.

run                 `pipemega.run`, the context manager around a training script
error_propagation   FailureReporter: publishes an error once and ends all ranks
final_report        one rank prints the error, every rank logs its details
error_log           the log with the details
run_progress        step and newest checkpoint, for the error message
process_exit        order and code of the exits; skips the interpreter's teardown
sigterm             SIGTERM of the launcher
failure_store       the failure reports in the store of the process group
missing_ranks       finds the ranks that did not report after a lost connection
watchdog            reports where a hanging rank is, and ends it
preemption          StopRequest: signals and the time limit
"""
