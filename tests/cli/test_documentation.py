"""What the documentation names is in the code: commands, options, columns, keys, hints, messages, files, figures."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

from slurm_migbatch.cli.main import COMMANDS, cli
from slurm_migbatch.cli.migacctclick import command as migacct
from slurm_migbatch.config.schema import Config, GpuConfig, ModelConfig
from slurm_migbatch.report.columns import COLUMNS
from slurm_migbatch.workload.hints import FORMS
from tests.support.shown_calls import CODE, FENCE, PAGES, ROOT, calls, inline, inline_calls, section, shell, text_of

PROGRAMS: dict[str, click.Command] = {"migbatch": cli, "migacct": migacct}


def fault(program: str, words: list[str], *, loose: bool) -> str:
    """What is wrong with a call, empty if nothing is; a loose call may end with an option without its value."""
    return _fault(PROGRAMS[program], program, list(words), loose)


def _fault(command: click.Command, name: str, words: list[str], loose: bool) -> str:
    context = click.Context(command, info_name=name, **command.context_settings)
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        for choice in re.split(r"[|,]", words[0].strip("{}")):
            below = command.get_command(context, choice)
            if below is None:
                return f"{name} has no command {choice}"
            if wrong := _fault(below, f"{name} {choice}", words[1:], loose):
                return wrong
        return ""
    try:
        values, rest, _ = command.make_parser(context).parse_args(words)
    except click.BadOptionUsage as error:
        return "" if loose and "requires an argument" in error.message else f"{name}: {error.message}"
    except click.UsageError as error:
        return f"{name}: {error.message}"
    if rest and not context.allow_extra_args:
        return f"{name} takes no {rest}"
    return _unknown_columns(values.get("columns", [])) if name == "migacct" else ""


def _unknown_columns(asked: list[str]) -> str:
    known = {column.name.lower() for column in COLUMNS}
    names = [name.lstrip("+") for words in asked for name in words.split(",")]
    unknown = [name for name in names if name.partition("%")[0].lower() not in known]
    return f"migacct has no columns {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    wrong = [fault(program, words, loose=False) for line in shell(page) for program, words in calls(line)]
    wrong += [fault(program, words, loose=True) for code in inline(page) for program, words in inline_calls(code)]
    assert [line for line in wrong if line] == []


def test_call_check_finds_documented_calls_and_reports_wrong_ones() -> None:
    assert sum(len(list(calls(line))) for page in PAGES for line in shell(page)) >= 40
    assert sum(len(list(inline_calls(code))) for page in PAGES for code in inline(page)) > 80
    assert [
        fault(program, words, loose=False) for program, words in calls('eval "$(migbatch testbed env)"; migacct -a')
    ] == ["", ""]
    assert fault("migbatch", ["tops"], loose=True) == "migbatch has no command tops"
    assert "--bogus" in fault("migbatch", ["bench", "{dispatch,sharing}", "--bogus"], loose=True)
    assert "-D" in fault("migbatch", ["why", "-D", "3"], loose=True)
    assert "requires an argument" in fault("migbatch", ["report", "--html"], loose=False)
    assert "Bogus" in fault("migacct", ["-o", "JobID,Bogus%20"], loose=False)
    assert [words for _, words in calls("migbatch waste $(migacct -n -X | head -n 1)")] == [
        ["waste", "$"],
        ["-n", "-X"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_is_in_a_block_that_is_not_checked(page: Path) -> None:
    for language, block in FENCE.findall(text_of(page)):
        if language != "sh" and "$ " not in block:
            assert not re.findall(
                rf"^ *(?:\S*/)?migbatch (?:{'|'.join(COMMANDS)})\b|^ *migacct ", block, re.MULTILINE
            ), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {name for names in targets for name in names.split()}
    for line in [*shell(page), *inline(page)]:
        if line.startswith("make "):
            words = re.split(r" +#|[;|&]", line)[0].split()[1:]
            assert {word for word in words if "=" not in word} <= known, line


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_have_existing_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(linked)), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    for code in " ".join(inline(page)).split():
        if re.match(r"(?:slurm_migbatch|tests|docs|sbatch_examples|gres_templates)/[\w./-]*$", code):
            assert (ROOT / code).exists(), code


def test_readme_links_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w./]+\.md)", text_of(ROOT / "README.md")))
    assert {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"} <= linked


SECTIONS = {
    item.name: {key.name for key in fields(type(item.default))}
    for item in fields(Config)
    if item.name not in ("gpus", "models", "path")
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_configuration_keys_exist(page: Path) -> None:
    for code in inline(page):
        if found := re.match(r"\[(\w+)\](?: (\w+))?", code):
            assert found[1] in SECTIONS, code
            assert found[2] is None or found[2] in SECTIONS[found[1]], code


def test_admin_page_lists_every_section_with_its_own_keys() -> None:
    rows = re.findall(
        r"^\| `\[(\w+)\]` \|[^|]*\|([^|]*)\|$", section(ROOT / "docs/admin.md", "Configure"), re.MULTILINE
    )
    assert [name for name, _ in rows] == list(SECTIONS)
    for name, keys in rows:
        assert {code.partition(" = ")[0] for code in CODE.findall(keys)} <= SECTIONS[name]
    assert fields(GpuConfig) and fields(ModelConfig)


def test_every_hint_has_a_row_to_which_the_readme_links() -> None:
    page = ROOT / "docs/users.md"
    rows = re.findall(r"^\| (`\w.*?) \|", section(page, "Hints") + section(page, "Language models"), re.MULTILINE)
    assert {hint for row in rows for hint in CODE.findall(row)} == set(FORMS)
    readme = section(ROOT / "README.md", "What it is for")
    assert "docs/users.md#hints" in readme
    assert {code.partition("=")[0] for code in CODE.findall(readme) if re.match(r"\w+=", code)} <= set(FORMS)


@cache
def texts() -> tuple[str, ...]:
    """Every string of the code, with `...` for each inserted value."""
    found = []
    for path in (ROOT / "slurm_migbatch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.replace("%s", "..."))
    return tuple(found)


@pytest.mark.slow
def test_messages_of_the_troubleshooting_table_are_in_the_code() -> None:
    table = section(ROOT / "docs/users.md", "Troubleshooting by message")
    messages = re.findall(r"^\| `(.+?)` \| ", table, re.MULTILINE)
    assert len(messages) > 20
    assert [message for message in messages if not any(message in text for text in texts())] == []


def test_readme_figures_are_in_the_measurements_page() -> None:
    number = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
    measured = set(number.findall(text_of(ROOT / "docs/measurements.md")))
    rows = [line for line in section(ROOT / "README.md", "Measured").splitlines() if line.startswith("|")]
    assert len(rows) > 4
    assert set(number.findall(" ".join(row.split("|")[2] for row in rows[2:]))) <= measured


def test_readme_picture_is_a_small_png() -> None:
    picture = (ROOT / "docs/report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) <= 150_000
