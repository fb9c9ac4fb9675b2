"""Dates: how urgent each step is, from a few numbers that a search can turn.

A date is when a step would run if each micro-batch went through the pipeline alone and undisturbed,
and one set out after the other:

    date of a step of micro-batch n  =  turn of n  +  way of the step

The *way* stretches or shrinks forward and backward, and puts a gap between them; the *turn* lets
micro-batches set out evenly or in groups. Steps are then urgent in the order of their dates: where
backward is far off, forwards come first and much is held; where weights come late, they fill gaps.
"""

import random
from dataclasses import dataclass, replace

from pipemega.pipeline.synthesis.problem import Problem

# A lag that outlasts every step: only when nothing else is left.
_LAST = 1e4

# dates[code][n]: of the step of micro-batch n; for F, I and W.
Dates = list[list[float]]


@dataclass(frozen=True)
class Policy:
    """What makes the dates, and what else guides a construction. Times in units of the problem.

    Args:
        forward, backward: how much longer the way is drawn than it takes.
        gap: between the end of the way forward and the start of the way back.
        weight_lag: how long a W may wait.
        group: micro-batches that set out together.
        spacing: between two of a group.
        pace: between groups, per micro-batch.
        horizon: how far beyond its own date an F leaves memory to others (`greedy.py`).
        patience: the share of a step by which it may hold up a more urgent one that is to arrive;
            patience_of_weights: that of a W.
        whole: whether backwards run whole; otherwise only where memory leaves no choice.
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
    def drawn(cls, problem: Problem, rng: random.Random) -> "Policy":
        """Any policy at all."""
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
    def proven(cls, problem: Problem) -> "list[Policy]":
        """Policies that came out best elsewhere, over many sizes, costs and limits."""
        p = problem.num_ranks
        policies = [
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
            policies += [replace(policy, whole=True) for policy in policies]
        return policies

    def varied(self, problem: Problem, rng: random.Random) -> "Policy":
        """This policy with one or two of its numbers changed."""
        policy = self
        for _ in range(rng.choice((1, 1, 2))):
            policy = policy._with_one_changed(problem, rng)
        return policy

    def _with_one_changed(self, problem: Problem, rng: random.Random) -> "Policy":
        name = rng.choice((*_SCALED, *_SHIFTED, "any"))
        if name == "any":
            other = Policy.drawn(problem, rng)
            name = rng.choice(tuple(vars(other)))
            return replace(self, **{name: getattr(other, name)})
        value = getattr(self, name)
        if name in _SCALED or (name == "weight_lag" and rng.random() < 0.5):
            return replace(self, **{name: value * rng.uniform(0.6, 1.6)})
        return replace(self, **{name: value + rng.uniform(-1, 1)})

    def dates(self, problem: Problem) -> Dates:
        """The date of each F, I and W of each micro-batch."""
        num, time, travels = problem.num_stages, problem.time, problem.travels
        way = [0.0] * (3 * num)
        at = 0.0
        for stage in range(num):
            at += self.forward * travels[stage]
            way[stage] = at
            at += self.forward * time[stage]
        at += self.gap
        for stage in reversed(range(num)):
            at += self.backward * travels[num + stage]
            way[num + stage] = at
            at += self.backward * time[num + stage]
            way[2 * num + stage] = at + self.weight_lag
        turns = [
            n // self.group * self.group * self.pace + n % self.group * self.spacing
            for n in range(problem.num_microbatches)
        ]
        return [[start + turn for turn in turns] for start in way]


_SCALED = ("forward", "backward", "spacing", "pace")
_SHIFTED = ("gap", "weight_lag", "horizon")
