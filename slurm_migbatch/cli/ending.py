"""End of a command: exit codes, and error lines on stderr. Without click, for `migacct`."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

#: modules that need another extra than `controller`
_EXTRAS = {"pynvml": "node", "matplotlib": "plot", "rich": "login", "plotly": "report", "markupsafe": "report"}
_LAB = "slurm_migbatch.lab"
#: SQLAlchemy's database errors; commands without a database do not import it
_OF_DATABASES = ("OperationalError", "InternalError", "InterfaceError", "DatabaseError")
#: packages of migbatch that an installation may lack
_PARTS = {
    _LAB: "the simulator and the experiments (slurm_migbatch.lab) are",
    "slurm_migbatch.testbed": "the test bed (slurm_migbatch.testbed) is",
}


class Failure(Exception):
    """An error that the user can act on; the text is one sentence that says how.

    Attributes:
        code: the exit code.
    """

    def __init__(self, sentence: str, code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.code = code


def ending(prog: str, work: Callable[[], object]) -> int:
    """Run a command's function, which may return its exit code, and turn every expected failure, including a missing
    package, into a line on stderr.
    """
    _replace_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of jobs may have characters that the locale lacks
    try:
        code = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader closed the pipe, as `| head` does; discard what Python still buffers
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


def _replace_closed_streams() -> None:
    """Discard what goes to stdout or stderr if it is closed, as by `2>&-`: print() would take stdout for stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def leave(code: int) -> NoReturn:
    """End the process immediately with this exit code; no other threads run and all files are closed.

    The interpreter's own shutdown frees all imported objects: a tenth of the run time of a short command.
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
    from slurm_migbatch.mig.text import printable

    lines: list[str] = []
    for line in text.splitlines():
        if lines and not line.startswith("  "):
            lines[-1] += f" {line}"
        else:  # a list of the message's own, of bad lines or of a program's output
            lines.append(line)
    # it may repeat text of a file or of another user
    print(f"{prog}: error: " + "\n".join(printable(line.expandtabs()) for line in lines), file=sys.stderr)
    return code


def _missing(error: ModuleNotFoundError) -> str:
    """Return which package is missing and how to install it, as a sentence; empty if the module is always present."""
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
    """Return whether an error is meant for the user and not a bug.

    It is if it is migbatch's own, the system's about a file or a peer, or the database's about itself (full, locked,
    read-only, damaged, unavailable).
    """
    is_own = type(error).__module__.partition(".")[0] == "slurm_migbatch"
    return isinstance(error, OSError) or is_own or (type(error).__name__ in _OF_DATABASES and hasattr(error, "orig"))


def describe(error: BaseException) -> str:
    """Return an expected error as a sentence."""
    if (cause := getattr(error, "orig", None)) is not None:
        return f"database error: {cause}; see `migbatch db check`"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
