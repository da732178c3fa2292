"""Run the fast path of a root hook: pass the job to the resident agent, or do its work here.

Starting Python takes longer than everything the agent does for a warm slice, so this module and its imports are limited
to built-in modules and `_socket`. If the agent fails, `fallback.run` runs the same executor in a child;
if that fails, the hook ends with a specific exit code (`exits.py`).

Wire form, one request per connection over RunDir/agent.sock: `<hook>\\0KEY=VALUE\\0...\\0\\0`, answered by
`<exit code>\\n<one line for slurmd's log>` and the end of the stream.
"""

from __future__ import annotations

import posix
import sys

from slurm_migbatch.node import conf, exits

ALLOWED = (
    b"SLURMD_NODENAME",
    b"SLURM_JOB_ACCOUNT",
    b"SLURM_JOB_COMMENT",
    b"SLURM_JOB_EXIT_CODE2",
    b"SLURM_JOB_ID",
    b"SLURM_JOB_PARTITION",
    b"SLURM_JOB_RESTART_COUNT",
    b"SLURM_JOB_UID",
    b"SLURM_JOB_USER",
    b"SLURM_SCRIPT_CONTEXT",
)
"""All variables that are read from a hook's environment; each value is checked again by `hookenv`."""

MAX_JOB = 0xFFFFFFFF
MAX_RESTART = 0xFFFF
"""slurmctld counts restarts in 16 bits."""

COMMENT_TAIL = 8192
"""Bytes of the comment that are passed on: the marker is at its end."""

MARKER = b"[mig:"
SOCKET = "agent.sock"
MAX_REPLY = 4096


def main(hook: str, etc: str) -> None:
    """Run one hook (`prolog` or `epilog`) and end the process with its exit code."""
    environ = dict(posix.environ)
    try:
        code, line = run(hook, etc, environ)
    except BaseException as error:
        code, line = exits.INTERNAL, f"{hook} failed: {type(error).__name__}: {error}"
    if code:
        note_failure(hook, etc, environ, code, line)
    finish(code, line)


def note_failure(hook: str, etc: str, environ: dict[bytes, bytes], code: int, line: str) -> None:
    """Record why a hook fails, for `migbatch doctor`; not possible if node.conf cannot be read."""
    from slurm_migbatch.node import failure

    try:
        node = conf.node_name(environ)
        failure.note(conf.run_dir(conf.read(f"{etc}/{conf.NAME}", node), node), hook, code, line)
    except ValueError:
        pass


def finish(code: int, line: str) -> None:
    """Print `line` where slurmd logs it and exit at once, without the interpreter's own shutdown."""
    if line:
        text = "migbatch: " + line.replace("\n", " ") + "\n"
        try:  # noqa: SIM105  (contextlib is slow to import)
            posix.write(2 if code else 1, text.encode("utf-8", "backslashreplace"))
        except OSError:
            pass
    posix._exit(code)


def run(hook: str, etc: str, environ: dict[bytes, bytes]) -> tuple[int, str]:
    """Return exit code and line for one hook with this environment."""
    unmarked = environ.get(b"SLURM_JOB_UID") != b"0" and MARKER not in _comment(environ)
    if hook == "prolog" and unmarked and not had_slices(etc, environ):
        return exits.OK, ""
    posix.umask(0o077)
    posix.chdir("/")
    while posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC) < 3:
        pass  # a closed stdin, stdout or stderr: no other file may get its number
    kept = {key: environ[key] for key in ALLOWED if key in environ}
    if b"SLURM_JOB_COMMENT" in kept:
        kept[b"SLURM_JOB_COMMENT"] = _comment(environ)
    if posix.geteuid() != 0:
        return exits.CONTEXT, f"{hook} must be run by root; set SlurmdUser=root"
    try:
        node = conf.node_name(kept)
        settings = conf.read(f"{etc}/{conf.NAME}", node)
        directory = conf.run_dir(settings, node)
    except ValueError as error:
        return exits.INSTALLATION, str(error)
    if hook == "epilog":
        note_end(directory, kept)
    try:
        # if AgentWait is no number, `fallback` says where
        return ask(f"{directory}/{SOCKET}", hook, kept, float(settings.get("AgentWait") or conf.AGENT_WAIT_S))
    except (OSError, ValueError, OverflowError) as error:
        reason = f"agent: {error}"
    for key in posix.environ:
        posix.unsetenv(key)
    from slurm_migbatch.node.fallback import run as work

    return work(hook, etc, kept, reason, environ.get(b"SLURM_JOB_SLUID", b""))


def had_slices(etc: str, environ: dict[bytes, bytes]) -> bool:
    """Return whether an earlier run of a requeued job left a hand-off here, which would stop the tasks of this one."""
    job = environ.get(b"SLURM_JOB_ID", b"").decode("ascii", "replace")
    if environ.get(b"SLURM_JOB_RESTART_COUNT", b"0") == b"0":
        return False
    try:
        node = conf.node_name(environ)
        names = posix.listdir(conf.run_dir(conf.read(f"{etc}/{conf.NAME}", node), node) + "/job")
    except (ValueError, OSError):  # a fault here must not stop jobs without slices
        return False
    return any(name.partition(".")[0] == job for name in names)


def _comment(environ: dict[bytes, bytes]) -> bytes:
    return environ.get(b"SLURM_JOB_COMMENT", b"")[-COMMENT_TAIL:]


def note_end(directory: str, environ: dict[bytes, bytes]) -> None:
    """Record that the job's runs are over before anything else is tried (`ending.py`).

    If that fails (no directory: no slice was allocated here since boot; RunDir full) the Epilog continues. If it
    then dies, the run is ended because Slurm no longer has it (`liveness.py`).
    """
    job, restart = environ.get(b"SLURM_JOB_ID", b""), environ.get(b"SLURM_JOB_RESTART_COUNT", b"%d" % MAX_RESTART)
    if not (job.isdigit() and restart.isdigit() and len(job) <= 10 and len(restart) <= 5):
        return
    if not 0 < int(job) <= MAX_JOB or int(restart) > MAX_RESTART:
        return
    path = f"{directory}/ending/{int(job)}.{int(restart)}"
    try:
        handle = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_CLOEXEC | posix.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        posix.lockf(handle, posix.F_TLOCK, 0)  # as long as this process lives: the descriptor stays open
        posix.write(handle, environ.get(b"SLURM_JOB_EXIT_CODE2", b"")[:16])
    except OSError:
        pass


def encode(hook: str, environ: dict[bytes, bytes]) -> bytes:
    """Encode a request; values cannot hold NUL because they come from an environment."""
    fields = [hook.encode("ascii"), *(key + b"=" + value for key, value in sorted(environ.items()))]
    return b"\0".join(fields) + b"\0\0"


def decode(reply: bytes) -> tuple[int, str]:
    """Decode the exit code and line of a reply. Raises ValueError."""
    head, newline, line = reply.partition(b"\n")
    if not newline or not head.isdigit() or len(head) > 3 or not 0 <= int(head) <= 255:
        raise ValueError("the answer is truncated")
    return int(head), line.decode("utf-8", "backslashreplace").strip()


def ask(path: str, hook: str, environ: dict[bytes, bytes], wait: float) -> tuple[int, str]:
    """Let the agent at `path` run the hook, within `wait` seconds. Raises OSError or ValueError."""
    import _socket

    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        link.settimeout(wait)
        link.connect(path)
        peer = link.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
        if int.from_bytes(peer[4:8], sys.byteorder) != 0:
            raise ValueError("the socket is not served by root")
        link.sendall(encode(hook, environ))
        reply = b""
        while True:
            part = link.recv(MAX_REPLY)
            if not part:
                return decode(reply)
            reply += part
            if len(reply) > MAX_REPLY:
                raise ValueError("the answer is too long")
    finally:
        link.close()
