"""Serialize a training's state: by pickle, or by torch if it holds tensors.

torch is imported here only if the given state, or the checkpoint that is read, needs it.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Mapping
from typing import IO, Any

PICKLE, TORCH = "pickle", "torch"
_DEPTH = 8


def form_of(state: Any) -> str:
    """Return the form that a state needs."""
    torch = sys.modules.get("torch")
    return TORCH if torch is not None and _holds(state, torch.Tensor, _DEPTH) else PICKLE


def _holds(state: Any, kind: type, depth: int) -> bool:
    if isinstance(state, kind):
        return True
    if not depth:
        return False
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return any(_holds(part, kind, depth - 1) for part in parts)


def dump(state: Any, form: str, file: IO[bytes]) -> None:
    """Write a state from the file's position on. Raises errors of the file and of pickle."""
    if form == TORCH:
        sys.modules["torch"].save(state, file)
    else:
        pickle.dump(state, file, protocol=5)


def load(form: str, file: IO[bytes]) -> Any:
    """Read a state back; tensors are placed in main memory, whatever device they came from.

    Only for files whose owner and checksum were verified: reading either form can run code.
    """
    if form == TORCH:
        return importlib.import_module("torch").load(file, map_location="cpu", weights_only=False)
    return pickle.load(file)  # noqa: S301 - the user's own file, see above
