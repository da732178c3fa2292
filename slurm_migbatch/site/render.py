"""Render gres_templates with Jinja2; a missing name is an error, never an empty string."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from jinja2 import BaseLoader, Environment, FunctionLoader, StrictUndefined, TemplateNotFound

_PACKAGE: Final = "slurm_migbatch.gres_templates"


class TemplateMissing(LookupError):
    """No template of that name is installed."""


def template_loader() -> BaseLoader:
    """Return a loader of templates by file name from the package slurm_migbatch.gres_templates."""
    return FunctionLoader(_source)


def _source(template: str) -> str | None:
    try:
        return files(_PACKAGE).joinpath(template).read_text(encoding="utf-8")
    except (FileNotFoundError, ModuleNotFoundError):
        return None


def render(template: str, **names: object) -> str:
    """Return the text of `template` (a file name below gres_templates) with `names` filled in.

    Raises:
        TemplateMissing: there is no such template.
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
    try:
        return environment.get_template(template).render(**names)
    except TemplateNotFound as error:
        raise TemplateMissing(f"{_PACKAGE} has no template {error.name!r}; reinstall slurm-migbatch") from error
