"""Experiments whose command is run more than once in a test."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def measured_once(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Cache the module's `measure`: later calls with the same arguments return the first result."""
    measure = module.measure
    results: dict[str, Any] = {}

    def once(*args: Any, **options: Any) -> Any:
        key = repr((args, sorted((name, value) for name, value in options.items() if name != "progress")))
        if key not in results:
            results[key] = measure(*args, **options)
        return results[key]

    monkeypatch.setattr(module, "measure", once)
