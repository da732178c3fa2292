"""Endings of model files, which users write as part of a model's name: `yolov8n.pt`."""

from __future__ import annotations

from typing import Final

_ENDINGS: Final = (
    "bin ckpt engine ggml gguf h5 keras mar mlmodel onnx pb plan pt pt2 pth safetensors tflite torchscript trt"
)
ENDINGS: Final = frozenset(_ENDINGS.split())


def without_ending(name: str) -> str:
    """Return a name in lower case without the ending of a model file; the same name if it has none.

    The Lua shim has the same rule (`gres_templates/migbatch_core.lua.j2`).
    """
    stem, dot, ending = name.rpartition(".")
    return stem if stem and dot and ending in ENDINGS else name
