"""Load the target to measure: a Python factory (`module:callable`, `file.py:callable`) or a command. Standard library.

For Python: `make(batch, input_size)` prepares everything and returns a callable without arguments that
processes one batch. A factory that takes one argument gets only the batch. The callable may have attributes: `sync`
(a callable that waits until a batch is complete, if neither torch nor jax nor cupy is used), `model` (a
torch.nn.Module whose parameters are counted), `params` and `flops_per_item` (numbers).

For commands: the program prints a line `migbatch: items=32 seconds=0.0123` for each batch, or for each
group of batches, that it has timed after its own warm-up; `migbatch: oom` if the batch does not fit.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_PLACE = re.compile(r"\{([a-z_]*)\}")
_LINE = re.compile(r"\s*migbatch:\s+(\S.*)")
PLACES = ("batch", "input", "repeats", "seconds")
"""Placeholders in a command."""

_NUMBERS = ("items", "seconds", "memory_mib", "params", "flops_per_item")


class TargetError(ValueError):
    """An invalid target; the message says what to write."""


class Python(NamedTuple):
    """A factory: `where` is a module's name or the path of a file, `attribute` a dotted name in it."""

    where: str
    attribute: str

    @property
    def is_file(self) -> bool:
        """Whether `where` is a path."""
        return self.where.endswith(".py") or "/" in self.where


def parse_python(text: str) -> Python:
    """Read `module:callable` or `file.py:callable`; raises TargetError."""
    where, colon, attribute = text.rpartition(":")
    if not colon or not where or not all(part.isidentifier() for part in attribute.split(".")):
        raise TargetError(
            f"'{text}' is not a target: write module:callable or file.py:callable, for example bench.py:make"
        )
    target = Python(where, attribute)
    if target.is_file and not os.path.isfile(where):  # noqa: PTH113 (this module starts fast in any Python)
        raise TargetError(f"no such file: {where}")
    return target


def parse_command(text: str, inputs: bool) -> tuple[str, ...]:
    """Return the words of a command; `inputs` says whether input sizes are given. Raises TargetError."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise TargetError(f"the command cannot be parsed: {error}") from None
    if not arguments:
        raise TargetError("the command is empty")
    named = {name for argument in arguments for name in _PLACE.findall(argument)}
    unknown = sorted(name for name in named - set(PLACES) if name)
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in PLACES)
        raise TargetError(f"the command has {{{unknown[0]}}}, which is not one of {known}")
    if "batch" not in named:
        raise TargetError("the command has no placeholder for the batch: write {batch} in it, as in --batch {batch}")
    if inputs != ("input" in named):
        problem = "is not in the command" if inputs else "is in the command, but --inputs is not given"
        raise TargetError(f"{{input}} {problem}: give both or neither")
    return arguments


def fill(arguments: tuple[str, ...], values: dict[str, object]) -> list[str]:
    """Return the words of a command with its placeholders filled in."""
    return [_PLACE.sub(lambda m: str(values.get(m[1], m[0])), argument) for argument in arguments]


def parse_line(line: str) -> dict[str, float] | None:
    """Parse a line `migbatch: key=value ...` of a command; None for any other line. Raises TargetError."""
    match = _LINE.fullmatch(line.rstrip())
    if match is None:
        return None
    numbers: dict[str, float] = {}
    for pair in match[1].split():
        key, _, value = pair.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if key not in _NUMBERS or not 0 < number < float("inf"):
            raise TargetError(
                f"the command wrote {line.strip()[:80]!r}, where {pair[:40]!r} cannot be parsed: write "
                "'migbatch: items=<number> seconds=<number>'"
            )
        numbers[key] = number
    return numbers


def load(target: Python) -> Callable[..., Any]:
    """Import the factory; raises TargetError if it does not exist, and any exception of its module."""
    if target.is_file:
        path = os.path.abspath(target.where)  # noqa: PTH100
        sys.path.insert(0, os.path.dirname(path))  # noqa: PTH120
        name = os.path.splitext(os.path.basename(path))[0]  # noqa: PTH119, PTH122
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise TargetError(f"{path} cannot be imported: is it a Python file?")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        module = importlib.import_module(target.where)
    value: Any = module
    for part in target.attribute.split("."):
        if not hasattr(value, part):
            raise TargetError(f"{target.where} has no '{target.attribute}'")
        value = getattr(value, part)
    if not callable(value):
        raise TargetError(f"{target.where}:{target.attribute} is not callable")
    make: Callable[..., Any] = value
    return make


def prepare(make: Callable[..., Any], batch: int, input_size: int | None) -> Callable[[], Any]:
    """Call the factory; raises TargetError if its arguments or its result are not as required."""
    arguments: tuple[object, ...] = (batch,) if input_size is None else (batch, input_size)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            signature.bind(*arguments)
        except TypeError:
            wanted = "give --inputs" if input_size is None else "omit --inputs"
            raise TargetError(
                f"the target takes {signature}, not {len(arguments)} argument(s): write make(batch, input_size) or "
                f"make(batch), or {wanted}"
            ) from None
    step = make(*arguments)
    if not callable(step):
        raise TargetError(
            f"the target returned {type(step).__name__}: make(batch, input_size) must return a callable without "
            "arguments that processes one batch"
        )
    run: Callable[[], Any] = step
    return run


def status(code: int) -> str:
    """Return how a process ended, by its exit code: below 0 by a signal."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
