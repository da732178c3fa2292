"""Find lines of the site's that need what an uninstallation removes: changed by hand, or moved to another file.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from slurm_migbatch.install import scripts
from slurm_migbatch.install.catalogline import has_gres
from slurm_migbatch.install.files import FileChange, read
from slurm_migbatch.install.slurmconf import INCLUDED, Conf, Line, load
from slurm_migbatch.install.topology import SWITCH
from slurm_migbatch.slurm.nodelist import NodeListError, items


def leftovers(main: str, changes: Sequence[FileChange]) -> Iterator[str]:
    """Yield a sentence for each line that needs what `changes` remove, once they are made.

    Args:
        main: path of slurm.conf; gres.conf, topology.conf and the Lua scripts are beside it.
    """
    after = {change.path: change.after for change in changes if change.kind != "directory" and not change.conflict}
    removed = {path for path, text in after.items() if text is None}

    def text_after(path: str) -> str | None:
        return after[path] if path in after else read(path)

    conf = load(main, text_after)
    own_file = conf.beside(INCLUDED)
    names: list[str] = []  # of nodes and switches that are removed
    if own_file in removed:
        catalog = (values["nodename"] for _, values in load(own_file, read).records("nodename"))
        names = [SWITCH, *(name for listed in catalog for name in items(listed))]
    for part in (conf, load(conf.beside("gres.conf"), text_after), load(conf.beside("topology.conf"), text_after)):
        for line in part.lines:
            if needed := list(dict.fromkeys(_needed(part, line, removed, names))):
                yield _sentence(line.place, ", ".join(needed))
    if own_file in removed:
        yield from _lua(conf, removed, text_after)


def _lua(conf: Conf, removed: Collection[str], text_after: Callable[[str], str | None]) -> Iterator[str]:
    """Yield a sentence for each Lua script that slurm.conf or a script of the site still loads.

    `text_after`: returns what a file contains after the removal.
    """
    for key, name in (("JobSubmitPlugins", "job_submit.lua"), ("CliFilterPlugins", "cli_filter.lua")):
        script, module = conf.beside(name), conf.beside(scripts.BESIDE[name])
        setting = conf.setting(key)
        if script in removed and setting and "lua" in scripts.plugins(setting[1].value):
            yield _sentence(setting[0].place, script)
        if module in removed and scripts.calls_lua(text_after(script) or "", module):
            yield _sentence(script, module)


def _needed(conf: Conf, line: Line, removed: Collection[str], names: Sequence[str]) -> Iterator[str]:
    """Yield what a line needs of what is removed."""
    if line.include and conf.beside(line.include) in removed:
        yield line.include
    for token in line.tokens:
        if token.value.startswith("/") and token.value in removed:
            yield token.value
        if names and has_gres({token.key: token.value}, "mig"):
            yield "mig"
        with suppress(NodeListError):
            listed = set(items(token.value)) if names else ()
            yield from (name for name in names if name in listed)


def _sentence(place: str, needed: str) -> str:
    return f"{place} needs {needed}, which would be removed: change this line by hand first"
