"""Import the programs below packages/, which are not modules of the product."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGES = Path(__file__).parents[2] / "packages"


def program(name: str) -> ModuleType:
    """Import packages/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"packages_{name}", _PACKAGES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
