"""Compute when two jobs that share a slice end, and when they would end one after the other: closed forms. Pure.

From Lai et al., "Scheduling Deep Learning Jobs in Multi-Tenant GPU Clusters via Wise Resource Sharing" (IWQoS 2024,
arXiv 2407.13088), after the authors' code (Lai-JX/Scheduler, `cluster/switch.py`). Times are seconds; a slowdown says
how many times longer a job takes next to the other one, at least 1.
"""

from __future__ import annotations


def finishes(own: float, other: float, slow_own: float, slow_other: float) -> tuple[float, float]:
    """Return when two jobs that start together end.

    `own` and `other` are the times of each alone, `slow_own` and `slow_other` the slowdowns next to the other. After
    the first end the remaining job runs alone.
    """
    if slow_own * own >= slow_other * other:
        end = slow_other * other
        return end + own - end / slow_own, end
    end = slow_own * own
    return end, end + other - end / slow_other


def together(own: float, other: float, slow_own: float, slow_other: float) -> float:
    """Return the mean finish if both run together, in the closed form of the authors' code."""
    if slow_own * own >= slow_other * other:
        return own / 2 + (1 - 1 / (2 * slow_own)) * slow_other * other
    return other / 2 + (1 - 1 / (2 * slow_other)) * slow_own * own


def apart(own: float, other: float) -> float:
    """Return the mean finish if the other job runs first and the own one after it."""
    return other + own / 2


def pays(own: float, other: float, slow_own: float, slow_other: float) -> bool:
    """Return whether the pair is better off together.

    A start in between is never better than both (the paper's theorem).

    If `own` outlasts the other this is slow_other * (1 - 1 / (2 * slow_own)) < 1, whatever the lengths (equal
    slowdowns: below 1.5); else slow_own * (1 - 1 / (2 * slow_other)) < (1 + other / own) / 2.
    """
    return together(own, other, slow_own, slow_other) < apart(own, other)
