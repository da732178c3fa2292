"""Remove from a model's name what users write after it: the ending of its file (`yolov8n.pt`), or a tag."""

from __future__ import annotations

import re
from typing import Final

_ENDINGS: Final = (
    "bin ckpt engine ggml gguf h5 keras mar mlmodel onnx pb plan pt pt2 pth safetensors tflite torchscript trt"
)
ENDINGS: Final = frozenset(_ENDINGS.split())

_REVISION: Final = re.compile(r"/(?:tree|blob|resolve|raw|snapshots)/.*", re.DOTALL)
"""What follows a model's name in the addresses of a hub's pages and files, and in its cache on disk."""
_SIDE: Final = re.compile(r"r?([1-9][0-9]{2})", re.ASCII)
"""The side of the images in a tag of a timm model, in pixels."""
_PATCHED: Final = re.compile(r"(.*patch[0-9]+)-([1-9][0-9]{2})", re.ASCII)
"""A name of a vision transformer that ends with that side: `vit-large-patch16-384`."""


def spellings(name: str) -> tuple[str, ...]:
    """Return the forms of a name in lower case under which a model may be known, the most exact first: the name,
    without the ending of a file, without what follows the first dot, as tags of timm's models do, and for images of
    the usual side.

    The Lua shim has the same rule.
    """
    stem = name.partition(".")[0]
    match = _PATCHED.fullmatch(stem)
    return (name, without_ending(name), stem, *((f"{match[1]}-224",) if match else ()))


def without_place(name: str) -> str:
    """Return a name without the organisation, address or directory before it, and without a revision after it. Of the
    file of a model in GGUF, whose name says the precision, it is the name of the file.
    """
    place = name.rstrip("/")
    whole = place if place.lower().endswith((".gguf", ".ggml")) else _REVISION.sub("", place)
    last = whole.rsplit("/", 1)[-1]
    # directories of the cache are named models--ORGANISATION--NAME
    return last.rsplit("--", 1)[-1] if last.startswith("models--") else last


def without_ending(name: str) -> str:
    """Return a name in lower case without the ending of a model file; the same name if it has none.

    The Lua shim has the same rule (`gres_templates/migbatch_core.lua.j2`).
    """
    stem, dot, ending = name.rpartition(".")
    return stem if stem and dot and ending in ENDINGS else name


def tagged_side(name: str) -> int:
    """Return the side in pixels of the images that a timm model's tag states, or the end of a vision transformer's
    name, the largest of several; 0 if neither does: 384 of `convnext_base.fb_in22k_ft_in1k_384`.

    The Lua shim has the same rule.
    """
    stem, _, tag = name.rpartition("/")[2].replace("_", "-").partition(".")
    sides = [int(match[1]) for word in re.split(r"[.-]", tag) if (match := _SIDE.fullmatch(word))]
    patched = _PATCHED.fullmatch(stem)
    return max([*sides, int(patched[2]) if patched else 0])
