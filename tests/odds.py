"""What a sampler ought to do, in float64 and from the definitions, and whether its tokens fit.

Knows nothing of how tokens are sampled: probabilities come from `SamplingParams`'s docstring, and tokens are
judged by chi-square tests whose limit a right sampler passes but for 3 seeds in 10 million.
"""

from __future__ import annotations

import math

import numpy as np

from samir_vllm.sampling import SamplingParams

DEVIATIONS = 5.0
"""Of a normal number: beyond them lie 2.9e-7."""

FEWEST = 10.0
"""Expected in a cell of a chi-square test: with fewer its distribution is another."""


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Of each token, float64 [vocab_size], for logits [vocab_size] that need no adjustment.

    A filter's edge is exact only where nothing lies within 1e-12 of it.
    """
    values = logits.astype(np.float64)
    ranked = np.argsort(-values, kind="stable")
    x = np.exp((values[ranked] - values.max()) / params.temperature)
    if params.top_k:
        x[params.top_k :] = 0
    x[x < params.min_p] = 0
    before = np.concatenate([[0.0], np.cumsum(x)[:-1]])
    beyond = before >= params.top_p * x.sum()
    beyond[0] = False
    if params.top_p < 1:
        x[beyond] = 0
    result = np.empty_like(x)
    result[ranked] = x / x.sum()
    return result


def chi_square_limit(freedom: int, deviations: float = DEVIATIONS) -> float:
    """What chi-square exceeds as seldom as a normal number its ``deviations`` (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * max(0.0, 1 - spread + deviations * math.sqrt(spread)) ** 3


def misfit(counts: np.ndarray, expected: np.ndarray) -> str | None:
    """What is wrong with counts [n] of cells whose probabilities are ``expected`` [n]; None if nothing.

    Cells with few expected counts are put together. Counts that fit too well are wrong, too.
    """
    impossible = np.flatnonzero((expected == 0) & (counts > 0))
    if len(impossible):
        return f"{counts[impossible].sum()} tokens in cells {impossible[:9]}, whose probability is 0"
    wanted = expected * counts.sum()
    rare = wanted < FEWEST
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    counts, wanted = counts[wanted >= FEWEST], wanted[wanted >= FEWEST]
    freedom = len(wanted) - 1
    if freedom < 1:
        return None
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    least, most = chi_square_limit(freedom, -DEVIATIONS), chi_square_limit(freedom)
    if least <= statistic <= most:
        return None
    worst = np.argmax((counts - wanted) ** 2 / wanted)
    return (
        f"chi-square {statistic:.4g} of {freedom} degrees of freedom, not {least:.4g} to {most:.4g}; "
        f"the worst cell has {counts[worst]}, expected {wanted[worst]:.1f}"
    )


def assert_fits(counts: np.ndarray, expected: np.ndarray) -> None:
    """Fails with the reason where counts [n] don't fit the probabilities [n]."""
    found = misfit(counts, expected)
    assert found is None, found


def assert_independent(first: np.ndarray, second: np.ndarray, cells: int = 8) -> None:
    """Fails where pairs of numbers from [0, 1), each [n], don't fill ``cells`` x ``cells`` squares evenly."""
    squares = (first * cells).astype(np.int64) * cells + (second * cells).astype(np.int64)
    assert_fits(np.bincount(squares, minlength=cells**2), np.full(cells**2, cells**-2.0))


def cells_of(expected: np.ndarray, head: int = 50, groups: int = 200) -> np.ndarray:
    """A cell for each id, int64 [vocab_size], few enough for a chi-square test over a large vocabulary.

    The ``head`` likeliest ids have a cell each; the others, id by id, fill ``groups`` of equal probability.
    """
    likeliest = np.argsort(-expected, kind="stable")[:head]
    tail = expected.copy()
    tail[likeliest] = 0
    sums = np.cumsum(tail)
    cells = np.minimum((sums * (groups / max(sums[-1], 1e-300))).astype(np.int64), groups - 1)
    # What can't be drawn isn't mixed with what can.
    cells[tail == 0] = groups + len(likeliest)
    cells[likeliest] = groups + np.arange(len(likeliest))
    return cells


def in_cells(values: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Sums of ``values`` [vocab_size] by cell; the same number of cells for all that share ``cells``."""
    return np.bincount(cells, values, minlength=int(cells.max()) + 1)


def uniforms(tokens: np.ndarray, expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers in [0, 1), one for each token: even, and independent of each other, if the tokens are right.

    Each lies at random between the sums of the probabilities before and up to its token.
    """
    sums = np.cumsum(expected)
    return np.minimum(sums[tokens] - rng.random(len(tokens)) * expected[tokens], np.nextafter(1, 0))
