"""Provide alert rules for Prometheus and a dashboard for Grafana, as files of this package."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

RULES: Final = "prometheus-rules.yml"
DASHBOARD: Final = "grafana-dashboard.json"


def text(name: str) -> str:
    """Return the text of RULES or DASHBOARD."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
