"""Render gres_templates with Jinja2; a missing name is an error, never an empty string."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import BaseLoader, Environment, FunctionLoader, StrictUndefined


def template_loader() -> BaseLoader:
    """Return a loader of templates by file name from the package slurm_migbatch.gres_templates."""
    directory = files("slurm_migbatch.gres_templates")
    return FunctionLoader(lambda name: directory.joinpath(name).read_text(encoding="utf-8"))


def render(template: str, **names: object) -> str:
    """Return the text of `template` (a file name below gres_templates) with `names` filled in.

    Raises:
        FileNotFoundError: there is no such template.
        jinja2.UndefinedError: the template uses a name that was not given.
    """
    environment = Environment(
        loader=template_loader(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - configuration files, not HTML
    )
    return environment.get_template(template).render(**names)
