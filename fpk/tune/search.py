"""Which candidate to try next: seeds, then rounds guided by a model of the times so far, then the best's neighbours.

Everything is deterministic: equal times are ordered by the candidates' own order, random numbers come from a seed.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Config = dict[str, Any]


@dataclass(frozen=True)
class Prior:
    """What is known from other shapes: a config, the sizes it was timed at, and its time over that shape's best."""

    config: Config
    sizes: dict[str, int]
    slowdown: float


class Search:
    """Ask for batches of candidate numbers, tell their times (None for one that failed).

    Args:
        candidates: all configs, the default first.
        seeds: numbers to try first, the most promising first (neighbours' and siblings' winners); the default is added.
        prior: trials of other shapes, from which the model learns what tends to be fast; `sizes` are this shape's.
        budget: how many candidates may be tried in all.
        batch: how many are asked for at once (they compile in parallel).
    """

    def __init__(
        self, candidates: Sequence[Config], seeds: Sequence[int] = (), budget: int = 100, batch: int = 8, seed: int = 0,
        prior: Sequence[Prior] = (), sizes: Mapping[str, int] | None = None, sm_count: int = 132,
    ) -> None:  # fmt: skip
        self.candidates = list(candidates)
        self.budget = min(budget, len(self.candidates))
        self.batch = min(batch, max(2, self.budget // 8))  # few trials: look at each before choosing the next
        self.us: dict[int, float | None] = {}
        self._random = random.Random(seed)
        self._seed = seed
        sizes = dict(sizes or {})
        prior = [p for p in prior if p.sizes.keys() == sizes.keys()]
        everything = features([*self.candidates, *(p.config for p in prior)])
        self._features = everything[: len(self.candidates)]
        width = len(at_shape({}, sizes, sm_count))
        here = torch.tensor([at_shape(c, sizes, sm_count) for c in self.candidates])
        self._x = torch.cat([self._features, here.reshape(-1, width)], 1)
        there = torch.tensor([at_shape(p.config, p.sizes, sm_count) for p in prior])
        self._prior_x = torch.cat([everything[len(self.candidates) :], there.reshape(-1, width)], 1)
        self._prior_y = [math.log(p.slowdown) for p in prior]
        self._queue = list(dict.fromkeys([0, *seeds]))[: self.budget] if self.candidates else []
        self._warm = len(self._queue) > 1
        if self.budget >= len(self.candidates):
            self._queue = list(dict.fromkeys([*self._queue, *range(len(self.candidates))]))
        elif not self._warm:
            self._queue += [i for i in self._spread(min(self.budget // 4, 24)) if i not in self._queue]

    def ask(self) -> list[int]:
        """The next candidates to try; [] when the search is over."""
        left = self.budget - len(self.us)
        if left <= 0:
            return []
        queued = [i for i in self._queue if i not in self.us][: min(self.batch, left)]
        if queued:
            return queued
        untried = [i for i in range(len(self.candidates)) if i not in self.us]
        polish = left <= max(self.budget // 4, self.batch)
        chosen = self._neighbours(untried)[: left if polish else 2]
        for i in self._promising(untried):
            if len(chosen) >= min(self.batch, left):
                break
            if i not in chosen:
                chosen.append(i)
        return chosen[: min(self.batch, left)]

    def tell(self, number: int, us: float | None) -> None:
        self.us[number] = us

    def ranking(self) -> list[int]:
        """Numbers of those that ran, fastest first."""
        return sorted((i for i, us in self.us.items() if us is not None), key=lambda i: (self.us[i], i))

    def _spread(self, n: int) -> list[int]:
        """A random start that covers the space: each next one is the farthest of a few draws from those chosen."""
        chosen = [0]
        everyone = list(range(1, len(self.candidates)))
        for _ in range(n):
            draws = self._random.sample(everyone, min(8, len(everyone)))
            near = [float((self._features[i] - self._features[chosen]).abs().sum(-1).min()) for i in draws]
            chosen.append(draws[max(range(len(draws)), key=lambda d: (near[d], -draws[d]))])
        return chosen[1:]

    def _neighbours(self, untried: list[int]) -> list[int]:
        """Untried candidates next to the best three, nearest first."""
        best = self.ranking()[:3]
        if not best or not untried:
            return []
        distance = (self._features[untried][:, None] - self._features[best][None]).abs().sum(-1)
        nearest, owner = distance.min(1)
        order = sorted(range(len(untried)), key=lambda i: (float(nearest[i]), int(owner[i]), untried[i]))
        return [untried[i] for i in order if nearest[i] <= 1.5]

    def _promising(self, untried: list[int]) -> list[int]:
        """Untried candidates, those first that the model holds for fast; every fourth is drawn at random."""
        known = [math.log(us) for us in self.us.values() if us]
        best, worst = min(known, default=0.0), max(known, default=0.0)
        tried = sorted(self.us)
        times = [(math.log(us) if (us := self.us[i]) else worst + 0.5) - best for i in tried]
        if len(set(times)) < 4 and not self._prior_y:
            return self._random.sample(untried, len(untried))
        own = OWN_WEIGHT if self._prior_y else 1
        x = torch.cat([self._prior_x, *[self._x[tried]] * own])
        score = predict(x, torch.tensor(self._prior_y + times * own), self._x[untried], self._seed)
        order = [untried[i] for i in sorted(range(len(untried)), key=lambda i: (float(score[i]), untried[i]))]
        strays = self._random.sample(untried, len(untried) // 4)
        mixed = []
        for n, i in enumerate(order):
            mixed.append(i)
            if n % 4 == 2 and strays and not self._warm:
                mixed.append(strays.pop())
        return list(dict.fromkeys(mixed))


# a trial of this shape says as much about it as this many of others
OWN_WEIGHT = 4


def at_shape(config: Config, sizes: Mapping[str, int], sm_count: int) -> list[float]:
    """What a config means at a shape, by the naming of launch fields: sizes, tiles, waves, and how full the last is."""
    logs = [math.log2(max(size, 1)) for _, size in sorted(sizes.items())]
    tiles = int(config.get("SPLIT_K") or 1)
    for name in ("M", "N"):
        if name in sizes and f"BLOCK_{name}" in config:
            tiles *= -(-sizes[name] // config[f"BLOCK_{name}"])
    waves = -(-tiles // sm_count)
    return [*logs, math.log2(max(tiles, 1)), math.log2(max(waves, 1)), tiles / (sm_count * max(waves, 1))]


def features(candidates: Sequence[Config]) -> torch.Tensor:
    """One row per config: log2 of numbers, one column per word; a step in one field is a distance of about 1."""
    names = sorted({n for c in candidates for n in c})
    columns: list[list[float]] = []
    for name in names:
        values = [c.get(name) for c in candidates]
        if len(set(map(repr, values))) == 1:
            continue
        numbers = [v for v in values if v is not None]
        if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers) and all(
            v > 0 for v in numbers
        ):
            logs = [math.log2(v) for v in numbers]
            middle = sum(logs) / len(logs)
            columns.append([middle if v is None else math.log2(v) for v in values])
        else:
            for word in sorted({repr(v) for v in values})[1:]:
                columns.append([float(repr(v) == word) for v in values])
    return torch.tensor(columns or [[0.0] * len(candidates)]).T.contiguous()


def predict(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor, seed: int) -> torch.Tensor:
    """Log-times expected at `at`: ridge regression on squares, averaged with randomised trees where scikit-learn is."""
    smooth = _ridge(x, y, at)
    try:
        from sklearn.ensemble import ExtraTreesRegressor
    except ImportError:
        return smooth
    forest = ExtraTreesRegressor(n_estimators=32, min_samples_leaf=1, random_state=seed, n_jobs=1)
    forest.fit(x.numpy(), y.numpy())
    trees = torch.stack([torch.from_numpy(tree.predict(at.numpy())) for tree in forest.estimators_])
    # optimism where the trees disagree: that is where something is to be learned
    return (smooth + trees.mean(0) - trees.std(0)) / 2


def _ridge(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    middle, spread = x.mean(0), x.std(0).clamp(min=0.5)
    a, b = _squares((x - middle) / spread), _squares((at - middle) / spread)
    penalty = 0.3 * torch.eye(a.shape[1], dtype=torch.float64)
    penalty[0, 0] = 1e-6
    weights = torch.linalg.solve(a.T @ a + penalty, a.T @ y.double())
    return b @ weights


def _squares(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([torch.ones(len(x), 1, dtype=torch.float64), x, x[:, i] * x[:, j]], 1)
