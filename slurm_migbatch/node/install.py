"""Write the hooks: small programs whose constants hold the paths of the package and the configuration.

They run as root with an isolated interpreter without site-packages, so everything they need is in these
constants; and each of them first verifies that only root could have changed what it is about to run.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurm_migbatch.node import conf

DEFAULT_HOME = "/opt/slurm-migbatch"
DEFAULT_PYTHON = f"{DEFAULT_HOME}/bin/python3"
DEFAULT_ETC = "/etc/migbatch"
COMPILE_S = 300.0
"""Time limit for compiling the hooks' imports; some seconds are usual."""

_HOOK = '''#!{python} -ISB
"""{title} {note}"""

import posix
import sys
import time

PATHS = {paths}
ETC = "{etc}"


def trust(path):
    """End here if anybody but root could have changed what is about to run (exit code 11, see `exits.py`)."""
    below = False
    while True:
        status = posix.stat(path)
        if status.st_uid != 0 or (status.st_mode & 0o022 and not (below and status.st_mode & 0o1000)):
            posix.write(2, f"migbatch: {{path}} must belong to root and be writable by nobody else\\n".encode())
            posix._exit(11)
        if path == "/":
            return
        path, below = path.rpartition("/")[0] or "/", True


def load():
    """Return the function that does the work."""
    for place in (*PATHS, PATHS[0] + "/slurm_migbatch/node", PATHS[0] + "/slurm_migbatch/mig", ETC):
        trust(place)
    sys.path[:0] = PATHS
    from slurm_migbatch.node.{module} import main
    return main


def load_during_upgrade():
    """Wait up to 10 s for the package: while it is replaced, files are missing, incomplete or of two releases."""
    until = time.monotonic() + 10.0
    while True:
        try:
            return load()
        except Exception as error:
            if time.monotonic() >= until:
                text = f"migbatch: not installed properly: {{error}}; run `migbatch install --role node --apply`\\n"
                posix.write(2, text.encode())
                posix._exit(11)
        for name in [name for name in sys.modules if name.partition(".")[0] == "slurm_migbatch"]:
            del sys.modules[name]
        sys.path_importer_cache.clear()
        time.sleep(0.2)


load_during_upgrade()({arguments})
'''

_ENROOT = '''#!{python} -ISB
"""Hook of Enroot: gives containers the MIG slices of their job. {note}"""

import sys

sys.path[:0] = {paths}
from slurm_migbatch.node.enroot import main

main("{etc}")
'''

WRITTEN = "Written by `migbatch install --role node`; do not edit."

HOOKS = {
    "prolog": ("client", '"prolog", ETC', "Prolog of slurmd: allocates a job's MIG slices."),
    "epilog": ("client", '"epilog", ETC', "Epilog of slurmd: releases a job's MIG slices."),
    "task_prolog": ("task_prolog", "ETC", "TaskProlog: passes its MIG slices to each task."),
}

_PLACES = re.compile(r"^((?:PATHS|ETC) = ).*$", re.MULTILINE)
_PLAIN = re.compile(r"/[A-Za-z0-9_./+@:=~-]*")


class InstallError(RuntimeError):
    """Something is not safe to run as root, or cannot be written; the message says what to do."""


def render(hook: str, paths: Sequence[str], etc: str, python: str) -> str:
    """Render one hook program."""
    return _render(hook, _listed(paths), etc, python, WRITTEN)


def enroot_hook(etc: Path, python: str) -> str:
    """Render the hook of Enroot. It runs as the user, in a user namespace in which nothing seems to belong to root.

    `programs` must have accepted the package and the interpreter.
    """
    paths = _listed(package_paths())
    return _ENROOT.format(python=_interpreter(python), paths=paths, etc=etc.resolve(), note=WRITTEN)


def _listed(paths: Sequence[str]) -> str:
    """Return the text of a tuple of paths."""
    listed = ", ".join(f'"{path}"' for path in paths)
    return f"({listed},)"


def example(hook: str) -> str:
    """Render one hook program for a virtual environment in DEFAULT_HOME, whatever its Python release."""
    release = "{sys.version_info[0]}.{sys.version_info[1]}"
    paths = f'(f"{DEFAULT_HOME}/lib/python{release}/site-packages",)'
    note = f"For a virtual environment in {DEFAULT_HOME};\n`migbatch install --role node` writes it for others."
    return _render(hook, paths, DEFAULT_ETC, DEFAULT_PYTHON, f"{note}\n")


def is_current(hook: str, text: str) -> bool:
    """Return whether the code of a hook program is this release's, whatever its interpreter and paths."""
    return _code(text) == _code(example(hook))


def _code(text: str) -> str:
    return _PLACES.sub(r"\1", text.partition("\nimport posix\n")[2])


def _render(hook: str, paths: str, etc: str, python: str, note: str) -> str:
    module, arguments, title = HOOKS[hook]
    return _HOOK.format(python=python, title=title, note=note, paths=paths, etc=etc, module=module, arguments=arguments)


def unit(program: str = f"{DEFAULT_HOME}/bin/migbatch", etc: str = DEFAULT_ETC) -> str:
    """Return migbatch-node.service. `program`: path of the command `migbatch` on the nodes."""
    return _file("migbatch-node.service").format(program=program, etc=etc)


def settings(controller: str = "", scontrol: str = "", slurm_conf: str = "", peers: Sequence[int] = (0,)) -> str:
    """Return a node.conf in which everything except these is a comment: the controllers' URLs, two paths, and the users
    as whom migbatchd may run.
    """
    text = _file("node.conf")
    if controller:
        text = text.replace("#Controller=http://controller:6830", f"Controller={controller}")
    if scontrol and scontrol != "/usr/bin/scontrol":
        text = text.replace("#ScontrolPath=/usr/bin/scontrol", f"ScontrolPath={scontrol}")
    if set(peers) != {0}:
        text = text.replace("#PeerUids=0", f"PeerUids={','.join(map(str, peers))}")
    return text.replace("#SlurmConf=", f"SlurmConf={slurm_conf}") if slurm_conf else text


def _file(name: str) -> str:
    """Return the text of a file of this package."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def check_plain(path: Path) -> None:
    """Raise InstallError if shells, slurm.conf and systemd would not read a path as one word."""
    if not _PLAIN.fullmatch(str(path)):
        raise InstallError(f"{path}: use an absolute path of letters, digits and _./+@:=~- only, without spaces")


def package_paths() -> list[str]:
    """Return the directories that hold this package and pynvml, with links resolved."""
    package_root = Path(__file__).resolve().parents[2]
    directories = [str(package_root)]
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise InstallError("pynvml is missing: pip install 'slurm-migbatch[node]'")
    nvml = str(Path(spec.origin).resolve().parent)
    return directories if nvml in directories else [*directories, nvml]


def programs(dest: Path, etc: Path, python: str, task_python: str = "") -> list[tuple[Path, str]]:
    """Render the three hooks, each with its path in `dest`. Writes nothing; call `compile_imports` too.

    Raises:
        InstallError: the package, an interpreter or one of the directories could be changed by others than root, or
            has a name that shells and Slurm do not read as one word.
    """
    paths = package_paths()
    interpreter = _interpreter(python)
    task_interpreter = _interpreter(task_python) if task_python else interpreter
    dest, etc = dest.resolve(), etc.resolve()
    check_plain(dest)
    check_plain(etc)
    checked = [*paths, f"{paths[0]}/slurm_migbatch/node", f"{paths[0]}/slurm_migbatch/mig"]
    checked += [str(_present(dest)), str(_present(etc))]
    for used in (Path(interpreter), Path(task_interpreter)):
        # in a virtual environment, the resolved path is elsewhere
        checked += [str(used.resolve()), str(used.parent)]
    checked += [str(path) for part in _imported(paths) for path in (part.rglob("*.py") if part.is_dir() else [part])]
    for path in checked:
        reason = conf.insecure(path)
        if reason:
            raise InstallError(reason)
    interpreters = {hook: task_interpreter if hook == "task_prolog" else interpreter for hook in HOOKS}
    return [(dest / hook, render(hook, paths, str(etc), used)) for hook, used in interpreters.items()]


def _present(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return next(place for place in (path, *path.parents) if place.exists())


def _interpreter(python: str) -> str:
    path = Path(python or sys.executable)
    if not path.is_absolute() or len(str(path)) > 100 or " " in str(path):
        raise InstallError(f"{python}: use an absolute path of at most 100 characters without spaces")
    if not path.exists():
        raise InstallError(f"no such interpreter: {python}")
    return str(path)


def _imported(paths: Sequence[str]) -> list[Path]:
    """Return the modules and package directories that hooks import from."""
    sources = [Path(paths[0]) / "slurm_migbatch" / name for name in ("__init__.py", "node", "mig")]
    return sources + [nvml for path in paths if (nvml := Path(path) / "pynvml.py").exists()]


def read_by_users(paths: Sequence[str]) -> list[Path]:
    """Return the files below the directories `paths` of hooks that TaskProlog may import."""
    package = Path(paths[0]) / "slurm_migbatch"
    return [*package.glob("__init__.py"), *sorted(package.glob("node/*.py"))]


def closed_to_users(paths: Iterable[Path]) -> str:
    """Return the first part of existing paths that denies access to ordinary users, with its mode; empty for none."""
    for path in paths:
        for part in [*reversed(path.parents), path]:
            mode = part.stat().st_mode
            needed = 0o001 if part != path else 0o005 if mode & 0o100 else 0o004
            if mode & needed != needed:
                return f"{part} (mode {mode & 0o7777:04o})"
    return ""


def compile_imports(python: str) -> None:
    """Compile the hooks' imports to byte code, because hooks never write byte code themselves.

    `programs` must have accepted the package and the interpreter. Raises InstallError.
    """
    interpreter, sources = _interpreter(python), _imported(package_paths())
    for directory in filter(Path.is_dir, sources):
        _discard(directory)
    try:
        result = subprocess.run(
            [interpreter, "-ISm", "compileall", "-q", *map(str, sources)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMPILE_S,
            umask=0o022,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{interpreter} cannot compile the package: {error}") from error
    if result.returncode:
        output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[-300:]
        raise InstallError(f"{interpreter} cannot compile the package: {output}")


def _discard(directory: Path) -> None:
    """Delete byte code that others than root may have changed, or that users cannot read: compileall would keep it."""
    try:
        for cache in directory.glob("**/__pycache__"):
            if not _fit(cache, 0o055):
                shutil.rmtree(cache)
                continue
            for compiled in cache.iterdir():
                if not _fit(compiled, 0o044):
                    compiled.unlink()
    except OSError as error:
        raise InstallError(f"cannot replace byte code that is not for everyone to read: {error}") from error


def _fit(path: Path, needed: int) -> bool:
    status = path.lstat()
    return status.st_uid == 0 and status.st_mode & (needed | 0o022) == needed
