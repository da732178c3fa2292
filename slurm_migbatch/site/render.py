"""Jinja2 rendering of gres_templates; a name that the caller forgot is an error, never an empty string."""

from __future__ import annotations

import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateNotFound

_PLACES = (
    Path(__file__).resolve().parents[2] / "gres_templates",  # a checkout
    Path(sys.prefix) / "share/slurm-migbatch/gres_templates",  # an installed wheel
)


class TemplateMissing(LookupError):
    """No template of that name is installed."""


def template_folder() -> Path:
    """Where the templates are, in a checkout or an installed wheel."""
    for folder in _PLACES:
        if folder.is_dir():
            return folder
    raise TemplateMissing(f"no templates in {' or '.join(map(str, _PLACES))}; install slurm-migbatch again")


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
