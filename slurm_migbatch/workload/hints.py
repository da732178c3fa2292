"""The hints of a job: `--comment="migbatch: model=bert-large batch=32 slo=200ms"`.

A comment (or extra text, where the site allows it) that begins with `migbatch:` holds key=value pairs separated by
blanks. Every key has an allow-list for its value; everything else is refused with a sentence. Hints affect only the
choice of a slice: they are never part of a shell command, a file name or SQL text.

| key | meaning | forms |
|---|---|---|
| model | what runs, by its public name | bert-large, meta-llama/Llama-3.1-8B |
| batch | items in one batch | 32 |
| input | size of one item | 512tok, 4k (4096), 224px, 224x320 |
| items | items in the whole job | 50000, 50k, 1.5m, 1e6 |
| slo | longest time for one batch | 200ms, 0.2s |
| deadline | longest time for all items, from the job's start | 2h, 1h30m, 02:30:00, 1-02:00:00 |
| pipeline | name shared by all jobs of one pipeline, connected by --dependency; its `deadline` is for all | caption-7 |
| mem | GPU memory that the job needs (replaces the estimate) | 18gb (10^9), 18GiB, 18G (2^30) |
| role | what the job does: inference, training, or being an instance of a service | infer, train, serve |
| min, max | smallest and largest profile to be chosen | 1g.10gb, 3g.40gb |
| cuda | how CUDA_VISIBLE_DEVICES names the slice | uuid, index |
| retry | run a batch job or array task once more, on a larger slice, where its own was too small | oom |
| signal | on this signal the job writes a checkpoint and continues | usr1, usr2 |

Language models have more, under the names that serving engines and trainers use (`llmhints`).

For a job array, `items` is the number of items of one task, and `deadline` is for all tasks, from the start of the
first. With `role=serve` each task is one instance of a service: `rate` is then the total of items or requests a second
for all of them, and the slice of one is chosen by memory and latency alone.

For a pipeline, `items` is the number of items of one job, and `deadline` is for all its jobs, from the submission of
the first; any of them may give it. If several do, the shortest counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from slurm_migbatch.workload import llmhints, nearmiss, units
from slurm_migbatch.workload.llmhints import LlmHints, Read, Reader, count, duration, matching, one_of, within
from slurm_migbatch.workload.refusal import Refusal, lower, show

PREFIX: Final = "migbatch:"
SERVE: Final = "serve"
"""The role of an instance of a service."""
MAX_BYTES: Final = 999
MODEL_FORM: Final = "a name of up to 96 letters, digits and . _ - / :, for example bert-large"
PROFILE_FORM: Final = "a full profile name, for example 1g.10gb"

_STRANGE = re.compile(r"[^A-Za-z0-9 =._:/+-]")
_MODEL = re.compile(r"[a-z0-9][a-z0-9._/:-]{0,95}")
_PIPELINE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PROFILE = re.compile(r"[0-9]{1,2}g\.[0-9]{1,4}gb[a-z.-]{0,8}")


NO_LLM: Final = LlmHints()

GivenFields = Mapping[str, str | int]
"""Values by the field that they are for."""


@dataclass(frozen=True)
class Hints:
    """The hints of a job. None: not given.

    `model`, `pipeline` and profiles are in lower case, profiles in GRES spelling (`1g.10gb.me`); `input_unit` is `tok`,
    `px` or empty; `slo_us` in microseconds, `deadline_s` in whole seconds, `mem_mib` in MiB.
    """

    model: str | None = None
    batch: int | None = None
    input: int | None = None
    input_unit: str = ""
    items: int | None = None
    slo_us: int | None = None
    deadline_s: int | None = None
    mem_mib: int | None = None
    role: str | None = None
    min: str | None = None
    max: str | None = None
    signal: str | None = None
    cuda: str | None = None
    retry: str | None = None
    pipeline: str | None = None
    llm: LlmHints = NO_LLM

    @property
    def kind(self) -> str:
        """The kind of work that is measured and predicted: `infer`, also for a service, or `train`, which hints about
        training say too.
        """
        return "train" if self.role == "train" or (self.role is None and self.llm.tunes) else "infer"

    @property
    def ignored(self) -> str:
        """The given hints that do not count in the job's role, `method=, seq=`; empty for none."""
        if self.kind == "infer" and self.role is None:
            return ""
        names = llmhints.OF_SERVING if self.kind == "train" else llmhints.OF_TRAINING
        return ", ".join(f"{name}=" for name in names if getattr(self.llm, name) is not None)

    def to_dict(self) -> dict[str, str | int]:
        """Return the hints that were given, JSON-able."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "llm"}
        values |= {field.name: getattr(self.llm, field.name) for field in fields(self.llm)}
        return {name: value for name, value in values.items() if value not in (None, "")}


def is_hint(text: str) -> bool:
    """Return whether a comment has hints for migbatch; any other text belongs to the user."""
    return text.startswith(PREFIX)


def unread(*texts: str) -> str:
    """Return the first key=value pair in the texts that are not read as hints; empty for none.

    Raises Refusal if its text names migbatch, because then it was meant as hints.
    """
    for text in texts:
        if not is_hint(text) and (pair := nearmiss.unread_pair(text, FORMS)):
            if PREFIX[:-1] in lower(text):
                raise Refusal("hint_near", show(pair))
            return pair
    return ""


def parse(*texts: str) -> Hints:
    """Read the hints of all texts that begin with the prefix (comment first, then extra); raises Refusal."""
    fields, of_llm = given_fields(*texts)
    # each field has its own type
    hints = Hints(**fields, llm=LlmHints(**of_llm) if of_llm else NO_LLM)  # type: ignore[arg-type]
    if hints.deadline_s is not None and hints.items is None and hints.pipeline is None:
        raise Refusal("deadline_alone")
    return hints


def given_fields(*texts: str) -> tuple[GivenFields, GivenFields]:
    """Return the given hints as fields of Hints and fields of LlmHints; raises Refusal."""
    values: dict[str, str] = {}
    for text in texts:
        if is_hint(text):
            _pairs(text, values)
    fields: dict[str, str | int] = {}
    of_llm: dict[str, str | int] = {}
    for key in _KEYS:  # in a fixed order, so that of several errors the same one is always reported
        if key in values:
            (of_llm if key in llmhints.KEYS else fields).update(_value(key, values[key]))
    return fields, of_llm


def _pairs(text: str, values: dict[str, str]) -> None:
    if len(text) > MAX_BYTES:
        raise Refusal("hint_long", str(len(text)))
    strange = _STRANGE.search(text)
    if strange is not None:
        char = strange[0]
        if ord(char) >= 0x80:
            raise Refusal("hint_ascii")
        raise Refusal("hint_char", char if " " < char <= "~" else f"number {ord(char)}")
    for token in text[len(PREFIX) :].split(" "):
        if not token:
            continue
        key, equals, value = token.partition("=")
        if not equals or not key:
            raise Refusal("hint_form", show(token))
        if key not in FORMS:
            raise _unknown(key)
        if key in values:
            raise Refusal("hint_twice", key)
        values[key] = value


def _unknown(key: str) -> Refusal:
    if lower(key) in nearmiss.SEVERAL_DEVICES:
        return Refusal("hint_devices", show(key))
    meant = nearmiss.nearest(key, FORMS)
    return Refusal("hint_typo", show(key), meant) if meant else Refusal("hint_key", show(key))


@lru_cache(1024)
def _value(key: str, text: str) -> Mapping[str, str | int]:
    value = _KEYS[key][1](lower(text))
    if value is None:
        if key == "model" and text.startswith("/"):
            raise Refusal("model_path", show(text))
        raise Refusal("hint_value", key, show(text), FORMS[key])
    return value


def _input(text: str) -> Read | None:
    size = units.input_size(text)
    if size is None or not 1 <= size[0] <= 10000000:
        return None
    return {"input": size[0], "input_unit": size[1]}


def _items(text: str) -> Read | None:
    return within("items", units.items(text), 1, 1000000000000)


def _deadline(text: str) -> Read | None:
    time = units.duration_us(text)
    return None if time is None else within("deadline_s", time // 1000000, 1, 366 * 86400)


def _mem(text: str) -> Read | None:
    return within("mem_mib", units.memory_mib(text), 1, 16777216)


def _profile(name: str) -> Reader:
    def read(text: str) -> Read | None:
        spelled = text.replace("+", ".")
        return {name: spelled} if _PROFILE.fullmatch(spelled) else None

    return read


_KEYS: Final[dict[str, tuple[str, Reader]]] = {
    "model": (MODEL_FORM, matching("model", _MODEL)),
    "batch": (llmhints.COUNT, count("batch")),
    "input": ("the size of one item, for example 512tok or 224px", _input),
    "items": ("how many items, for example 50000 or 50k", _items),
    "slo": ("a time with its unit from 100us to 1d, for example 200ms", duration("slo_us")),
    "deadline": ("a time with its unit from 1s to 366d, for example 2h", _deadline),
    "pipeline": (
        "a name of up to 64 letters, digits and . _ -, for example caption-7",
        matching("pipeline", _PIPELINE),
    ),
    "mem": ("an amount of memory with its unit, for example 18gb", _mem),
    "role": ("infer, train or serve", one_of("role", "infer", "train", SERVE)),
    "min": (PROFILE_FORM, _profile("min")),
    "max": (PROFILE_FORM, _profile("max")),
    "signal": ("usr1 or usr2", one_of("signal", "usr1", "usr2")),
    "cuda": ("uuid or index", one_of("cuda", "uuid", "index")),
    "retry": ("oom", one_of("retry", "oom")),
    **llmhints.KEYS,
}
FORMS: Final = {key: form for key, (form, _) in _KEYS.items()}
"""What to write for each key; also rendered into the Lua shims."""
