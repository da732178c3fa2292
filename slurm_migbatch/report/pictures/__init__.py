"""The page of charts: sums over the record in time bins, charts of them, and the HTML."""

from importlib import import_module


def require() -> None:
    """Raise ModuleNotFoundError if Plotly is not installed, before the record is read for it."""
    import_module("plotly")
