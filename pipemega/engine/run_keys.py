"""Config keys that describe a run, besides the training of single steps."""

from pipemega.config import Config


def describes_run(config: Config) -> bool:
    """Return whether the config has a key that `train_batch` acts on, besides the training."""
    training = config.training
    return (
        keeps_files(config)
        or ("steps_per_print" in config.model_fields_set and config.steps_per_print is not None)
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or training.exit_after_minutes is not None
        or training.exit_interval is not None
        or training.kill_switch_path is not None
        or training.on_nonfinite.policy is not None
        or training.check_replicas_every > 0
        or not training.model_fields_set.isdisjoint({"loss_spikes", "stragglers"})
    )


def keeps_files(config: Config) -> bool:
    """Return whether the run has files of its own besides what it prints."""
    trace = config.monitor.trace
    return (
        config.checkpoint.save is not None
        or config.csv_monitor.enabled
        or config.tensorboard.enabled
        or config.wandb.enabled
        or config.monitor.jsonl is not None
        or bool(trace.steps or trace.every)
    )
