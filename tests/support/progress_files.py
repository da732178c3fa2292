"""Files in which jobs report their progress."""

from __future__ import annotations


def path(node, job=1, restart=0):
    return node.root / "run" / "progress" / f"{job}.{restart}"


def write(node, text, job=1):
    with open(path(node, job), "a") as file:
        file.write(text)
