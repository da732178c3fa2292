"""Experiments whose command is run more than once in a test."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def measured_once(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Cache the module's `measure`: later calls with the same arguments, but for callbacks, return the first result."""
    measure = module.measure
    results: dict[str, Any] = {}

    def once(*args: Any, **options: Any) -> Any:
        by_name = sorted((name, value) for name, value in options.items() if not callable(value))
        key = repr(([value for value in args if not callable(value)], by_name))
        if key not in results:
            results[key] = measure(*args, **options)
        return results[key]

    monkeypatch.setattr(module, "measure", once)
