"""Hints: what users write, and what is refused with which message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.submit import notes
from slurm_migbatch.workload import llmhints, units
from slurm_migbatch.workload.hints import FORMS, Hints, parse
from slurm_migbatch.workload.refusal import SENTENCES, Refusal, show

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("200ms", 200_000),
        ("0.2s", 200_000),
        ("350us", 350),
        ("2h", 7_200_000_000),
        ("1h30m", 5_400_000_000),
        ("90min", 5_400_000_000),
        ("02:30:00", 9_000_000_000),
        ("1-02:00:00", 93_600_000_000),
        ("1-02", 93_600_000_000),
        ("2d", 172_800_000_000),
        ("200", None),
        ("10:30", None),
        ("-1s", None),
        ("1.2.3s", None),
        ("s", None),
        ("", None),
        ("1e3s", None),
        ("0x10s", None),
        ("9" * 50 + "s", None),
    ],
)
def test_durations_are_parsed(text: str, microseconds: int | None) -> None:
    assert units.duration_us(text) == microseconds


@pytest.mark.parametrize(
    ("text", "mib"),
    [("18gb", 17167), ("18gib", 18432), ("18g", 18432), ("900mb", 859), ("1tb", 953675), ("18", None), ("gb", None)],
)
def test_memory_sizes_are_parsed(text: str, mib: int | None) -> None:
    assert units.memory_mib(text) == mib


def test_input_sizes_and_item_counts_are_parsed() -> None:
    assert units.input_size("512tok") == (512, "tok")
    assert units.input_size("4k") == (4096, "")
    assert units.input_size("224x320") == (320, "px")
    assert units.input_size("5furlong") is None
    assert units.items("1.5m") == 1_500_000
    assert units.items("1e6") == 1_000_000
    assert units.items("1e99") is None
    assert units.items("50.000") is None, "fifty, or fifty thousand where the dot separates thousands"
    assert units.items("1.125k") == 1125 and units.items("50000.0") == 50_000
    assert units.input_size("1.024tok") is None is units.input_size("1.024") and units.input_size("1.5k") is not None


def test_all_hints_are_parsed_together() -> None:
    hints = parse(
        "migbatch: model=Meta-Llama/Llama-3.1-8B batch=32 input=4ktok items=1m slo=200ms deadline=2h mem=18GiB "
        "role=train min=1g.10gb max=3g.40gb"
    )
    assert hints == Hints(
        "meta-llama/llama-3.1-8b", 32, 4096, "tok", 1_000_000, 200_000, 7200, 18432, "train", "1g.10gb", "3g.40gb"
    )
    assert hints.to_dict()["slo_us"] == 200_000


def test_pipeline_deadline_is_accepted_without_items() -> None:
    hints = parse("migbatch: pipeline=Caption-7 deadline=2h")
    assert (hints.pipeline, hints.deadline_s, hints.items) == ("caption-7", 7200, None)
    assert parse("migbatch: pipeline=a items=5").pipeline == "a"


def test_service_has_the_kind_inference() -> None:
    hints = parse("migbatch: model=resnet50 role=serve rate=40 slo=50ms")
    assert (hints.role, hints.kind, hints.llm.rate, hints.slo_us) == ("serve", "infer", 40_000, 50_000)
    assert parse("migbatch: role=train").kind == "train" and Hints().kind == "infer"


@pytest.mark.parametrize("script", sorted((ROOT / "sbatch_examples").glob("*.sh")), ids=lambda path: path.name)
def test_hints_of_the_example_scripts_are_parsed(script: Path) -> None:
    for comment in re.findall(r'#SBATCH --comment="(.*)"', script.read_text(encoding="utf-8")):
        assert parse(comment) != Hints()


def test_hints_of_comment_and_extra_are_combined() -> None:
    assert parse("migbatch: model=x", "migbatch: batch=2") == Hints(model="x", batch=2)
    assert parse("mine", "migbatch: batch=2") == Hints(batch=2)
    assert parse("mine: migbatch: batch=2") == Hints()
    with pytest.raises(Refusal) as caught:
        parse("migbatch: batch=2", "migbatch: batch=2")
    assert caught.value.code == "hint_twice"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("slo=0", "hint_value"),
        ("slo=0ms", "hint_value"),
        ("mem=-1", "hint_value"),
        ("mem=18", "hint_value"),
        ("batch=1e12", "hint_value"),
        ("batch=0", "hint_value"),
        ("batch=", "hint_value"),
        ("input=1.5.5", "hint_value"),
        ("items=-5", "hint_value"),
        ("role=boss", "hint_value"),
        ("min=1g", "hint_value"),
        ("model=../../etc/passwd", "hint_value"),
        ("model=" + "x" * 97, "hint_value"),
        ("deadline=2h", "deadline_alone"),
        ("pipeline=", "hint_value"),
        ("pipeline=-x", "hint_value"),
        ("pipeline=a/b", "hint_value"),
        ("pipeline=" + "x" * 65, "hint_value"),
        ("pipline=x", "hint_typo"),
        ("colour=red", "hint_key"),
        ("MODEL=x", "hint_typo"),
        ("colour=x", "hint_key"),
        ("model", "hint_form"),
        ("=x", "hint_form"),
        ("model=x model=y", "hint_twice"),
        ("model=x;rm", "hint_char"),
        ("model=$(id)", "hint_char"),
        ("model=`id`", "hint_char"),
        ("model=x'OR'1", "hint_char"),
        ("model=x --drop", "hint_form"),
        ("model=x\tbatch=1", "hint_char"),
        ("model=x\nbatch=1", "hint_char"),
        ("model=x,batch=1", "hint_char"),
        ("model=\xe4", "hint_ascii"),
        ("model=\xff\xfe", "hint_ascii"),
        ("model=" + "x" * 1000, "hint_long"),
    ],
)
def test_invalid_hints_are_refused_with_advice(text: str, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse("migbatch: " + text)
    assert caught.value.code == code
    assert any(f": {verb} " in str(caught.value) for verb in ("use", "add", "give", "shorten", "swap", "request"))


@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        hints = parse("migbatch:" + text)
    except Refusal as refusal:
        assert str(refusal).isascii() and str(refusal).isprintable()
    else:
        assert all(str(value).isascii() for value in hints.to_dict().values())


def test_every_refusal_sentence_is_one_short_line() -> None:
    for code, sentence in SENTENCES.items():
        assert "\n" not in sentence, code
        assert "%" not in sentence.replace("%s", ""), code
        assert len(sentence) < 260, code


def test_shown_user_text_is_short_and_printable() -> None:
    assert show("a\x00b\xe4" + "c" * 60) == "a?b?" + "c" * 36 + "..."


def test_retry_hint_accepts_only_oom():
    assert parse("migbatch: retry=OOM").retry == "oom"
    with pytest.raises(Refusal, match="retry"):
        parse("migbatch: retry=always")


def test_refusal_of_an_unknown_hint_lists_all_general_hints():
    named = set(re.findall(r"[a-z_]+", str(Refusal("hint_key", "colour"))))
    assert named >= FORMS.keys() - llmhints.KEYS.keys()


@pytest.mark.parametrize("sentences", [SENTENCES, notes.MESSAGES], ids=["refusals", "notes"])
def test_sentences_for_users_are_short(sentences):
    """Terminals wrap them, and several may follow each other."""
    assert {code: len(text) for code, text in sentences.items() if len(text) > 200} == {}
