"""The page of pictures: sums over the record in bins of time, charts of them, and the HTML that holds it all."""

from importlib import import_module


def require() -> None:
    """Raise ModuleNotFoundError where Plotly is not installed, before the record is read for it."""
    import_module("plotly")
