"""Check that the Lua of Slurm's plugins finds lua-posix. Standard library only."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from slurm_migbatch.node.findings import OK, WARN, Finding

_FOLDERS: Final = ("/usr/share/lua", "/usr/local/share/lua")
_RELEASES: Final = ("5.1", "5.3", "5.4")
_LIBRARY: Final = re.compile(rb"liblua(?:-|\.so\.)?(5\.[0-9])")


def check_posix(folders: Iterable[str], plugin: str, effect: str) -> Finding:
    """Check that the Lua which a plugin of Slurm loads, or if that is unknown any Lua of this host, finds lua-posix.

    Args:
        folders: directories of Slurm's plugins.
        plugin: such as job_submit_lua.so.
        effect: what is the matter without the module.
    """
    release = _release(folders, plugin)
    for lua in (f"lua{release}", f"lua-{release}", "lua") if release else (*map("lua{}".format, _RELEASES), "lua"):
        script = f'assert(_VERSION:find("{release}$")) require "posix"'
        try:
            # not in the current directory, where Lua 5.1 looks first
            result = subprocess.run([lua, "-e", script], capture_output=True, timeout=10, check=False, cwd="/")
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            return Finding(OK, "lua-posix", f"found by {lua}")
    # Slurm needs only Lua's library, so a host may have no lua program
    for folder in _FOLDERS:
        for module in sorted(Path(folder).glob(f"{release or '5.*'}/posix/init.lua")):
            return Finding(OK, "lua-posix", f"is in {module.parent}")
    missing = f"Lua {release}, which Slurm's {plugin} loads, does not find" if release else "no Lua on this host finds"
    advice = f"install lua-posix for {f'Lua {release}' if release else 'the Lua of Slurm'}; until then {effect}"
    return Finding(WARN, "lua-posix", f"{missing} the module posix", advice)


def _release(folders: Iterable[str], plugin: str) -> str:
    """Return the release of the Lua that a plugin was built for, whose library it opens; empty if unknown."""
    for folder in folders:
        with suppress(OSError):
            found = {match[1].decode() for match in _LIBRARY.finditer(Path(folder, plugin).read_bytes())}
            return found.pop() if len(found) == 1 else ""
    return ""
