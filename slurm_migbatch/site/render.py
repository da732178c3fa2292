"""Jinja2 rendering of gres_templates; a name that the caller forgot is an error, never an empty string."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateNotFound

_PACKAGE = Path(__file__).resolve().parent.parent


class TemplateMissing(LookupError):
    """No template of that name is installed."""


def template_folder() -> Path:
    """Where the templates are: beside the package in a checkout, inside it in an installed wheel."""
    for folder in (_PACKAGE / "gres_templates", _PACKAGE.parent / "gres_templates"):
        if folder.is_dir():
            return folder
    raise TemplateMissing(f"no folder gres_templates in {_PACKAGE} or beside it; install slurm-migbatch again")


def render(template: str, **names: object) -> str:
    """Text of `template` (a file name below gres_templates) with `names` filled in.

    Raises:
        TemplateMissing: there is no such template.
        jinja2.UndefinedError: the template uses a name that was not given.
    """
    environment = Environment(
        loader=FileSystemLoader(template_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - configuration files, not HTML
    )
    try:
        return environment.get_template(template).render(**names)
    except TemplateNotFound as error:
        raise TemplateMissing(f"template {error.name!r} is not in {template_folder()}") from error
