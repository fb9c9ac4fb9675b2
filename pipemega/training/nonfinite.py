"""What the loop does about steps with inf or nan: `training.on_nonfinite`."""

from collections.abc import Callable

from pipemega.config import Config
from pipemega.errors import NonFiniteError
from pipemega.training.history import RunHistory


class NonFinitePolicy:
    """Decides on each such step, and keeps the budget; on every rank alike.

        policy      the step                                  counts
        null        as bf16.check_grad_overflow or fp16 say   no
        skip        changes nothing; the next batch follows   yes
        rollback    the newest checkpoint is loaded; then
                    the batch behind this one follows         yes
        stop        is an error                               -

    Args:
        config: of the run.
        history: that the budget is counted in.
        warn: says it, on one rank.
    """

    def __init__(self, config: Config, history: RunHistory, warn: Callable[[str], None]) -> None:
        self._policy = config.training.on_nonfinite.policy
        self._budget = config.training.on_nonfinite.budget
        self._history, self._warn = history, warn

    def skipped(self, what: str, origin: str) -> None:
        """A step was skipped for inf or nan (with fp16: in its loss, which no scale can mend).

        Raises:
            NonFiniteError: that was not to be, or was one too many.
        """
        error = NonFiniteError(what, origin=origin, on_every_rank=True)
        if self._policy in ("stop", "rollback"):
            raise error
        self._history.note(str(error))
        if self._policy is None:
            self._warn(f"{error}. The step is skipped")
            return
        self._spend()
        self._warn(f"{error}. The step is skipped ({self._spent()})")

    def roll_back(self, error: NonFiniteError) -> None:
        """Agrees to a rollback for `error`.

        Raises:
            NonFiniteError: `error` itself where the policy is another; the whole history where
                the budget is spent.
        """
        if self._policy != "rollback":
            raise error
        self._history.note(f"{error.what}: {error.origin}")
        self._spend()
        self._warn(f"{error.what}: {error.origin}. Going back ({self._spent()})")

    def _spend(self) -> None:
        self._history.spent += 1
        if self._history.spent > self._budget:
            lines = "\n  ".join(self._history.nonfinite)
            raise NonFiniteError(
                f"{self._history.spent} steps of this run had inf or nan, and "
                f"training.on_nonfinite.budget is {self._budget}:\n  {lines}\nLower the learning "
                "rate, go on from an older checkpoint (checkpoint.load_tag), or look for the cause "
                "where these lines point to",
                on_every_rank=True,
            )

    def _spent(self) -> str:
        return f"{self._history.spent} of training.on_nonfinite.budget {self._budget} spent"
