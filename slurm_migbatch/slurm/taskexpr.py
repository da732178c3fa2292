"""Read and write the expressions that name tasks of a job array, such as "4-400:2%4" or "[1,3-5]"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def expand_tasks(expression: str) -> tuple[int, ...]:
    """Return the task numbers in an array expression, in its order: "4-8:2%4" is 4, 6, 8. Raises ValueError."""
    return tuple(task for span in _spans(expression) for task in span)


def count_tasks(expression: str) -> int:
    """Return how many tasks an array expression names: "4-400:2%4" is 199, "1,3,5" is 3. Raises ValueError."""
    return sum(map(len, _spans(expression)))


def has_task(expression: str, task: str) -> bool:
    """Return whether an array expression names a task. Raises ValueError."""
    return any(int(task) in span for span in _spans(expression))


def fold_tasks(tasks: Iterable[int]) -> str:
    """Fold task numbers like Slurm, `1-3,5` for 1 2 3 5, without a step."""
    spans: list[list[int]] = []
    for task in sorted(tasks):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def _spans(expression: str) -> Iterator[range]:
    """Yield the parts of an expression without its throttle; squeue sometimes puts a list in brackets."""
    for part in expression.partition("%")[0].strip("[]").split(","):
        span, _, step = part.partition(":")
        low, dash, high = span.partition("-")
        tasks = range(int(low), (int(high) if dash else int(low)) + 1, int(step or 1))
        if tasks.stop > 1 << 32:
            raise ValueError(f"{part[:80]!r} names tasks beyond Slurm's numbers of 32 bits")
        yield tasks
