"""Render gres_templates with Jinja2; a missing name is an error, never an empty string."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import BaseLoader


def template_loader() -> BaseLoader:
    """Return a loader of templates by file name from the package slurm_migbatch.gres_templates."""
    from jinja2 import FunctionLoader  # slow to import, and migbatchd needs only other parts of this package

    directory = files("slurm_migbatch.gres_templates")
    return FunctionLoader(lambda name: directory.joinpath(name).read_text(encoding="utf-8"))


def render(template: str, **names: object) -> str:
    """Return the text of `template` (a file name below gres_templates) with `names` filled in.

    Raises:
        FileNotFoundError: there is no such template.
        jinja2.UndefinedError: the template uses a name that was not given.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        loader=template_loader(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - configuration files, not HTML
    )
    return environment.get_template(template).render(**names)
