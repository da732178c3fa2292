"""Command lines that migacct parses without click have the meaning that click gives them."""

from __future__ import annotations

import click
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_migbatch.cli.migacct import OPTIONS
from slurm_migbatch.cli.migacctclick import command
from slurm_migbatch.cli.options import completed, parse
from tests.support.examples import examples

FLAGS = [flag for option in OPTIONS for flag in option.flags]
TEXTS = st.sampled_from(["", "12", "a,b", "-", "--", "=x", "-1", "now-1hour", "-j", "--json", "x y", "ü"])
WORDS = st.one_of(
    st.sampled_from(FLAGS),
    TEXTS,
    st.tuples(st.sampled_from(FLAGS), st.sampled_from(["", "="]), TEXTS).map("".join),
    # several in one word: -nPX, -aj12
    st.lists(st.sampled_from([flag[1] for flag in FLAGS if len(flag) == 2]), min_size=2, max_size=4).map(
        lambda letters: f"-{''.join(letters)}"
    ),
    st.text(max_size=4),
)


@settings(max_examples=examples(2000))
@given(arguments=st.lists(WORDS, max_size=5))
@example(["-j12", "-uroot", "--user=bin,sys", "-nPX", "-o", "jobid,state%20", "--delimiter", ";"])
@example(["-aS", "now-1day", "-E=now"])
@example(["-j"])
@example(["--jobs="])
@example(["-a", "--"])
@example(["--allusers=1"])
def test_parsing_without_click_agrees_with_click(arguments: list[str]) -> None:
    ours = parse(OPTIONS, arguments)
    try:
        with command.make_context("migacct", list(arguments)) as context:
            theirs = context.params
    except (click.ClickException, click.exceptions.Exit):
        assert ours is None
        return
    assert ours is None or ours == theirs


def test_every_single_option_is_parsed_without_click() -> None:
    for option in OPTIONS:
        for flag in option.flags:
            found = parse(OPTIONS, [flag, "12"] if option.metavar else [flag])
            assert (found is None) == option.instead, flag


def test_beginning_of_one_long_option_is_completed_as_by_sacct() -> None:
    words = ["--start=now-1hour", "--acc", "chemistry", "--part", "gpu"]
    assert completed(OPTIONS, words) == ["--starttime=now-1hour", "--accounts", "chemistry", "--partition", "gpu"]
    assert completed(OPTIONS, ["--ver"]) == ["--version"]
    assert completed(OPTIONS, ["--us"]) == ["--us"], "--user or --usage"
    kept = ["--user", "root", "--parsable", "--all", "--he", "--", "--start"]
    assert completed(OPTIONS, kept) == kept


@given(arguments=st.lists(WORDS, max_size=5))
def test_only_unknown_words_are_completed(arguments: list[str]) -> None:
    for word, whole in zip(arguments, completed(OPTIONS, arguments), strict=True):
        assert whole == word or (word.partition("=")[0] not in FLAGS and whole.partition("=")[0] in FLAGS)
