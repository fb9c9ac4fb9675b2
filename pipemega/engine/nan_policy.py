"""Policy for steps with inf or nan: `training.on_nonfinite`."""

from collections.abc import Callable

from pipemega.config import Config
from pipemega.engine.run_stats import RunStats
from pipemega.errors import NonFiniteError


class NonFinitePolicy:
    """Decides about each such step and counts the budget; the same on every rank.

        policy      the step                                        uses the budget
        null        as bf16.check_grad_overflow or fp16 require     no
        skip        changes nothing; training continues with the
                    next batch                                      yes
        rollback    the newest checkpoint is loaded; training
                    continues with the batch after this one         yes
        stop        raises an error                                 -

    Args:
        config: of the run.
        history: counts the budget over restarts.
        warn: logs a warning, on one rank.
    """

    def __init__(self, config: Config, history: RunStats, warn: Callable[[str], None]) -> None:
        self._policy = config.training.on_nonfinite.policy
        self._budget = config.training.on_nonfinite.budget
        self._history, self._warn = history, warn

    def on_skip(self, what: str, origin: str) -> None:
        """Handle a step that was skipped for inf or nan (with fp16: in its loss).

        Raises:
            NonFiniteError: the policy does not allow to skip it, or the budget is used up.
        """
        error = NonFiniteError(what, origin=origin, on_every_rank=True)
        if self._policy in ("stop", "rollback"):
            raise error
        self._history.add_nonfinite(str(error))
        if self._policy is None:
            self._warn(f"{error}. The step is skipped")
            return
        self._use_budget()
        self._warn(f"{error}. The step is skipped ({self._used()})")

    def on_error(self, error: NonFiniteError) -> None:
        """Return if the run is to be rolled back after `error`.

        Raises:
            NonFiniteError: `error` itself if the policy is not "rollback"; an error with all such
                steps if the budget is used up.
        """
        if self._policy != "rollback":
            raise error
        self._history.add_nonfinite(f"{error.what}: {error.origin}")
        self._use_budget()
        self._warn(f"{error.what}: {error.origin}. Rolling back ({self._used()})")

    def _use_budget(self) -> None:
        self._history.spent += 1
        if self._history.spent > self._budget:
            lines = "\n  ".join(self._history.nonfinite)
            raise NonFiniteError(
                f"{self._history.spent} steps of this run had inf or nan, and "
                f"training.on_nonfinite.budget is {self._budget}:\n  {lines}\nLower the learning "
                "rate, resume from an older checkpoint (checkpoint.load_tag), or look for the "
                "cause in the layers that these lines name",
                on_every_rank=True,
            )

    def _used(self) -> str:
        return f"{self._history.spent} of training.on_nonfinite.budget {self._budget} used"
