"""Priorities of steps, computed from a few parameters that a search varies.

The priority of a step is the time at which it would run if each micro-batch went through the
pipeline without waiting for other micro-batches, and micro-batches started at given intervals:

    priority of a step of micro-batch n  =  start time of n  +  offset of the step

Steps with lower values run first. The parameters stretch the offsets of forward and backward, put a
gap between them and delay W; micro-batches start evenly or in groups. With a large gap,
forwards run first and more memory is held; with a large delay, W fills idle time.
"""

import random
from dataclasses import dataclass, replace

from pipemega.pipeline.autoschedule.problem import Problem

# A delay longer than any plan: such a step runs only if no other can.
_LAST = 1e4

# priorities[code][n]: of the step of micro-batch n; codes of F, I and W.
Priorities = list[list[float]]


@dataclass(frozen=True)
class PriorityRule:
    """Parameters of the priorities and of the greedy construction.  Times in units of the problem.

    Args:
        forward, backward: factor on the times of forward and backward in the offsets.
        gap: between the end of forward and the start of backward.
        weight_lag: delay of W.
        group: micro-batches that start as one group.
        spacing: interval between micro-batches of a group.
        pace: interval between groups, per micro-batch.
        horizon: how much later than its own priority an F reserves memory for others (`greedy.py`).
        patience: the fraction of a step by which it may delay a more urgent step whose input has
            not arrived yet.
        patience_of_weights: the same for W.
        whole: whether backwards run whole; otherwise only if memory requires it.
    """

    forward: float = 1.0
    backward: float = 1.0
    gap: float = 0.0
    weight_lag: float = 1.0
    group: int = 1
    spacing: float = 1.0
    pace: float = 1.0
    horizon: float = 0.0
    patience: float = 0.0
    patience_of_weights: float = 0.0
    whole: bool = False

    @classmethod
    def sample(cls, problem: Problem, rng: random.Random) -> "PriorityRule":
        """Return a random rule."""
        pick = rng.choice
        return cls(
            forward=pick((0.5, 1, 1, 1.5, 2, 3)),
            backward=pick((0.5, 1, 1, 1.5, 2, 3)),
            gap=pick((0, 0, 1)),
            weight_lag=pick((0, 1, 1, problem.num_ranks / 2, problem.num_ranks, _LAST)),
            group=(group := pick((1, 1, 1, 2, 3, 4, problem.num_ranks))),
            spacing=pick((0.01, 0.2, 0.4, 0.7, 1)) if group > 1 else 1,
            pace=pick((1, 1, 1, 2)),
            horizon=pick((-_LAST, -1, 0, 0, 1)),
            patience=pick((0, 0, 0, 0.5)),
            patience_of_weights=pick((0, 0, 1)),
            whole=problem.whole_backward_helps and rng.random() < 0.5,
        )

    @classmethod
    def known_good(cls, problem: Problem) -> "list[PriorityRule]":
        """Return rules that gave the best plans for many sizes, costs and limits."""
        p = problem.num_ranks
        rules = [
            cls(weight_lag=1, patience=0.5),
            cls(1.4, 3, 0, _LAST, p, 0.35, 1.8, -0.1, 0.5, 1),
            cls(2.4, 2.4, 1.6, 0.5, 1, 1, 1, -0.2, 0.5, 0),
            cls(2.1, 1.5, 1.1, _LAST, p, 0.4, 1, -0.2, 0.5, 1),
            cls(1.1, 1.2, 1.3, 7, 3, 0.4, 0.8, 0.1, 0.5, 1),
            cls(0.5, 2, 0, _LAST, p, 0.4, 2, 0, 0.5, 1),
            cls(1.5, 1.3, -0.8, 0, 4, 0.5, 2, -2, 0.5, 1),
            cls(3, 1, 0, _LAST, 1, 1, 1, 1, 0.5, 0),
            cls(1, 1.5, 1, 0, 1, 1, 1, 0, 0, 1),
        ]
        if problem.whole_backward_helps:
            rules += [replace(rule, whole=True) for rule in rules]
        return rules

    def mutated(self, problem: Problem, rng: random.Random) -> "PriorityRule":
        """Return this rule with one or two parameters changed."""
        rule = self
        for _ in range(rng.choice((1, 1, 2))):
            rule = rule._with_one_changed(problem, rng)
        return rule

    def _with_one_changed(self, problem: Problem, rng: random.Random) -> "PriorityRule":
        name = rng.choice((*_SCALED, *_SHIFTED, "any"))
        if name == "any":
            other = PriorityRule.sample(problem, rng)
            name = rng.choice(tuple(vars(other)))
            return replace(self, **{name: getattr(other, name)})
        value = getattr(self, name)
        if name in _SCALED or (name == "weight_lag" and rng.random() < 0.5):
            return replace(self, **{name: value * rng.uniform(0.6, 1.6)})
        return replace(self, **{name: value + rng.uniform(-1, 1)})

    def priorities(self, problem: Problem) -> Priorities:
        """Return the priority of each F, I and W of each micro-batch."""
        num, time, latency = problem.num_stages, problem.time, problem.latency
        offset = [0.0] * (3 * num)
        at = 0.0
        for stage in range(num):
            at += self.forward * latency[stage]
            offset[stage] = at
            at += self.forward * time[stage]
        at += self.gap
        for stage in reversed(range(num)):
            at += self.backward * latency[num + stage]
            offset[num + stage] = at
            at += self.backward * time[num + stage]
            offset[2 * num + stage] = at + self.weight_lag
        starts = [
            n // self.group * self.group * self.pace + n % self.group * self.spacing
            for n in range(problem.num_microbatches)
        ]
        return [[delay + start for start in starts] for delay in offset]


_SCALED = ("forward", "backward", "spacing", "pace")
_SHIFTED = ("gap", "weight_lag", "horizon")
