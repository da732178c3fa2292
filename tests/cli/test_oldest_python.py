"""Classes that Python 3.10, the oldest supported release, cannot create; mypy accepts them, and Debian 12 has 3.11."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import slurm_migbatch

PACKAGE = Path(slurm_migbatch.__file__).parent
SUBSCRIPTABLE = {"Generic", "Protocol", "dict", "list", "set", "tuple", "Callable", "Iterator", "Mapping", "Sequence"}
"""Generic classes of Python 3.10; logging.LoggerAdapter, for example, became one in 3.11."""


def _name(base: ast.expr) -> str:
    return ast.unparse(base).rpartition(".")[2]


#: to parse the first lines of classes alone takes a hundredth of the time of the whole package
_CLASS = re.compile(r"^ *(class \w+\(.*?\)):", re.MULTILINE | re.DOTALL)


def _refused(sources: Iterable[str]) -> Iterator[str]:
    lines = [line for source in sources for line in _CLASS.findall(source)]
    classes = [node for line in lines for node in ast.parse(f"{line}: ...").body if isinstance(node, ast.ClassDef)]
    known = SUBSCRIPTABLE.union([node.name for node in classes])
    for node in classes:
        generic = [_name(base.value) for base in node.bases if isinstance(base, ast.Subscript)]
        if ("NamedTuple" in map(_name, node.bases) and len(node.bases) > 1) or not known.issuperset(generic):
            yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"


def test_python_3_10_can_create_every_class() -> None:
    assert list(_refused(path.read_text() for path in PACKAGE.rglob("*.py"))) == []


def test_classes_that_python_3_10_cannot_create_are_found() -> None:
    sources = [
        "class A(NamedTuple, Generic[T]): ...",
        "class B(logging.LoggerAdapter[X]): ...",
        "class C(dict[K, V]): ...",
    ]
    assert [line[6] for line in _refused(sources)] == ["A", "B"]
