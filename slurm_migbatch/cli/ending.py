"""How a command ends: exit codes, and the line on stderr for what an error says. Without click, for `migacct`."""

from __future__ import annotations

import os
import sys

from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

#: modules that another extra brings than `controller` does
_EXTRAS = {"pynvml": "node", "matplotlib": "plot", "rich": "login", "plotly": "report", "markupsafe": "report"}
_LAB = "slurm_migbatch.lab"
#: what a database says of itself, by SQLAlchemy, which commands without one do not import
_OF_DATABASES = ("OperationalError", "InternalError", "InterfaceError", "DatabaseError")
#: packages of ours that an installation may leave out
_PARTS = {
    _LAB: "the simulator and the experiments (slurm_migbatch.lab) are",
    "slurm_migbatch.testbed": "the test bed (slurm_migbatch.testbed) is",
}


class Failure(Exception):
    """Something went wrong that the caller can act on; the text is one sentence that says how.

    Attributes:
        code: the exit code.
    """

    def __init__(self, sentence: str, code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.code = code


def ending(prog: str, work: Callable[[], object]) -> int:
    """Do a command's work and turn every expected failure, a package that is not installed too, into a line on stderr.

    Args:
        prog: the command's name.
        work: returns its exit code; anything but a number stands for 0.
    """
    try:
        code = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader went away, as `| head` does; what Python still holds must go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        text = _missing(error)
        if not text or "MIGBATCH_DEBUG" in os.environ:
            raise
        return _failed(prog, text)
    except Failure as error:
        return _failed(prog, str(error), error.code)
    except Exception as error:
        if not is_expected(error) or "MIGBATCH_DEBUG" in os.environ:
            raise
        return _failed(prog, describe(error))
    return code if isinstance(code, int) and not isinstance(code, bool) else 0


def leave(code: int) -> NoReturn:
    """End the process at once with this exit code, where nothing runs beside and all that was opened is closed.

    The interpreter's own end takes down object by object what was imported: a tenth of the time of a short command.
    """
    threading = sys.modules.get("threading")
    if "multiprocessing" in sys.modules or (threading is not None and threading.active_count() > 1):
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _failed(prog: str, text: str, code: int = EXIT_FAILED) -> int:
    print(f"{prog}: error: {text}", file=sys.stderr)
    return code


def _missing(error: ModuleNotFoundError) -> str:
    """Return what is not installed and how to get it, as a sentence; empty where it is a module that must be there."""
    name = error.name or ""
    if name in _PARTS:
        return f"{_PARTS[name]} not installed; install all with: pip install 'slurm-migbatch[lab]'"
    package = name.partition(".")[0]
    if package in ("", "slurm_migbatch"):
        return ""
    from traceback import walk_tb

    importers = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    in_lab = any(f"{importer}.".startswith(f"{_LAB}.") for importer in importers)
    extra = "lab" if in_lab else _EXTRAS.get(package, "controller")
    return (
        f"this needs the Python package {package}, which is not installed; run: pip install 'slurm-migbatch[{extra}]'"
    )


def is_expected(error: BaseException) -> bool:
    """Return whether an error speaks to the user and not about a bug: ours, the system's about a file or a peer, the
    database's about itself (full, locked, read-only, damaged, away)."""
    ours = type(error).__module__.partition(".")[0] == "slurm_migbatch"
    return isinstance(error, OSError) or ours or (type(error).__name__ in _OF_DATABASES and hasattr(error, "orig"))


def describe(error: BaseException) -> str:
    """Return an expected error as a sentence."""
    if (cause := getattr(error, "orig", None)) is not None:
        return f"database error: {cause}; see `migbatch db check`"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
