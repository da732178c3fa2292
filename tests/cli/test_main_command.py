"""The frame of `migbatch`: lazy commands, help, exit codes, and one-line errors."""

import importlib
import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from slurm_migbatch import monitoring
from slurm_migbatch.cli.common import LazyGroup, run
from slurm_migbatch.cli.config import config
from slurm_migbatch.cli.ending import Failure, describe, is_expected
from slurm_migbatch.cli.main import COMMANDS, cli
from slurm_migbatch.config import render as render_config
from tests.support.gpu_kinds import SITE


def migbatch(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "slurm_migbatch.cli", *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_its_help_is_complete(name):
    where, line = COMMANDS[name]
    module, _, attribute = where.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert command.name == name
    assert line.endswith(".")
    for path, subcommand in walk(command, name):
        assert subcommand.help, f"{path} has no help text"
        for parameter in subcommand.params:
            if isinstance(parameter, click.Option) and name not in ("testbed", "node", "explain"):
                assert parameter.help or parameter.hidden, f"{path} {parameter.opts[0]} has no help text"


@pytest.mark.parametrize("name", [name for name in sorted(COMMANDS) if name != "profile"])
def test_help_of_a_group_says_what_each_command_does_in_whole_sentences(name):
    for path, group in walk(cli.get_command(click.Context(cli), name), name):
        if isinstance(group, click.Group):
            printed = "".join(CliRunner().invoke(group, ["-h"]).output.split())  # lines are wrapped within words, too
            for child in group.commands.values():
                first = " ".join(child.help.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
                assert first.replace(" ", "") in printed, f"{path} -h cuts off: {first}"


def walk(command, path):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, f"{path} {name}")


def test_help_lists_all_commands_without_importing_them():
    code = (
        "import sys; from slurm_migbatch.cli.main import cli\n"
        "try: cli(['-h'], standalone_mode=False)\n"
        "finally: print(sorted(m for m in sys.modules if m.startswith(('sqlalchemy', 'starlette', 'slurm_migbatch.'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert done.stdout.rstrip().endswith(
        "['slurm_migbatch.cli', 'slurm_migbatch.cli.common', 'slurm_migbatch.cli.ending', 'slurm_migbatch.cli.main', "
        "'slurm_migbatch.values']"
    )


def test_node_commands_import_no_controller_packages():
    code = (
        "import sys; from slurm_migbatch.cli.main import cli; cli(['node', '-h'], standalone_mode=False)\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('sqlalchemy', 'jinja2', 'starlette', 'pandas')]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_version_option_prints_name_and_version():
    assert migbatch("--version").stdout.startswith("migbatch 0.")


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("show",), ("show", "a;b"), ("--nonsense",), ("nodes", "-n", "n[1")]
)
def test_wrong_usage_is_one_line_and_exit_2(arguments):
    done = migbatch(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("migbatch: error: ")
    assert done.stderr.count("\n") == 1


def test_configuration_error_names_its_line(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text("[store]\nulr = 'x'\n")
    done = migbatch("nodes", "-c", str(path))
    assert done.returncode == 1
    assert done.stderr == f"migbatch: error: {path}:2: unknown key 'ulr', did you mean 'url'? in [store]\n"


def test_missing_database_is_an_error_without_a_traceback(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(f"[store]\nurl = 'sqlite:///{tmp_path}/none.db'\n")
    done = migbatch("show", "12", "-c", str(path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("migbatch: error: ")


def test_closed_output_pipe_prints_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "slurm_migbatch.cli", "config", "render", "migbatch"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


class Ours(RuntimeError):
    __module__ = "slurm_migbatch.something"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Failure("do this"), 1, "do this"),
        (Ours("job 5 no longer exists"), 1, "job 5 no longer exists"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 1, "/x: No such file or directory"),
        (click.UsageError("what?"), 2, "what? (try 'prog -h')"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_failure_is_one_line_with_its_exit_code(error, code, text, capsys):
    @click.command()
    def command():
        raise error

    assert run(command, "prog", []) == code
    message = capsys.readouterr().err.strip()
    assert message == (f"prog: error: {text}" if text else "")


def test_bugs_keep_their_traceback():
    @click.command()
    def command():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(command, "prog", [])
    assert not is_expected(KeyError("x"))
    assert describe(OSError("odd")) == "odd"


def test_missing_package_error_names_the_extra(capsys):
    group = LazyGroup("migbatch", lazy={"x": ("no_such_package.x:x", "X.")})
    assert run(group, "migbatch", ["x"]) == 1
    message = capsys.readouterr().err
    assert "pip install 'slurm-migbatch[controller]'" in message
    assert "needs the Python package no_such_package" in message


def groups(command, path=()):
    """Every group of commands, by the words that name it."""
    if isinstance(command, click.Group):
        yield path
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from groups(command.get_command(context, name), (*path, name))


@pytest.mark.parametrize("path", list(groups(cli)), ids=lambda path: " ".join(path) or "migbatch")
def test_command_group_alone_prints_its_help(path, capsys):
    assert run(cli, "migbatch", [*path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Usage: {' '.join(('migbatch', *path))} [OPTIONS] COMMAND [ARGS]...\n")
    assert "error" not in captured.err.splitlines()[0]
    assert run(cli, "migbatch", [*path, "-h"]) == 0
    assert capsys.readouterr().out == captured.err


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("migbatch.cli.main:cli --bogus", 2, "No such option '--bogus' (try 'prog -h')"),
        ("migbatch.cli.migacctclick:command --allocation", 1, "did you mean --allocations"),
        ("migbatch.cli.main:cli config render", 2, "Choose from: migbatch, prometheus, grafana"),
    ],
)
def test_wrong_arguments_are_a_one_line_error(command, code, text, capsys):
    """sacct exits with 1, and so does migacct."""
    where, *arguments = command.split()
    assert run(f"slurm_{where}", "prog", arguments) == code
    message = capsys.readouterr().err
    assert message.startswith("prog: error: ")
    assert text in message
    assert message.count("\n") == 1


def test_rendered_default_configuration_passes_the_check(tmp_path):
    path = tmp_path / "etc/migbatch/migbatch.toml"
    assert migbatch("config", "render", "migbatch", "-o", str(path)).returncode == 0  # which makes the directory
    assert migbatch("config", "check", "-c", str(path)).stdout == f"{path}: ok\n"


@pytest.mark.parametrize(
    ("profile", "catalog", "warning"),
    [
        ("99g.1gb", False, "no known GPU has submit.default_profile = 99g.1gb"),
        (
            "3g.39gb",
            True,
            "no GPU of this site has submit.default_profile = 3g.39gb: write one of 1g.5gb, 1g.10gb, ",
        ),
        ("3g.39gb", False, ""),
        ("3g.40gb", True, ""),
    ],
)
def test_default_profile_that_no_gpu_has_is_warned_about(tmp_path, profile, catalog, warning):
    path = tmp_path / "m.toml"
    path.write_text(f'[submit]\ncatalog = "{tmp_path}/catalog.json"\ndefault_profile = "{profile}"\n')
    if catalog:
        (tmp_path / "catalog.json").write_text(json.dumps(SITE.to_dict()))
    done = migbatch("config", "check", "-c", str(path))
    assert (done.returncode, done.stdout) == (0, f"{path}: ok\n")
    assert done.stderr.startswith(f"migbatch: warning: {path}:3: {warning}") if warning else not done.stderr


def test_existing_file_is_not_overwritten_without_force(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "migbatch.toml"
    path.write_text("[lending]\nenabled = true\n")
    path.chmod(0o640)
    os.chown(path, 64001, 64001)
    (tmp_path / "link").symlink_to("migbatch.toml")

    def render(*words):
        return CliRunner().invoke(config, ["render", *words], standalone_mode=False)

    for name in ("migbatch.toml", "link"):
        refused = render("migbatch", "-o", name)
        assert "already exists and is not overwritten" in str(refused.exception)
    assert path.read_text() == "[lending]\nenabled = true\n"
    assert render("migbatch", "-o", "link", "--force").exception is None
    assert (tmp_path / "link").is_symlink() and path.read_text() == render_config()
    status = path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (64001, 64001, 0o640)
    assert render("migbatch", "-o", "migbatch.toml").exception is None, "the file already has this text"
    assert sorted(os.listdir()) == ["link", "migbatch.toml"]


def test_rendering_writes_into_a_pipe_and_refuses_a_dangling_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        done = CliRunner().invoke(config, ["render", "prometheus", "-o", str(tmp_path / "pipe")], standalone_mode=False)
        assert done.exception is None
        assert reader.communicate()[0] == monitoring.text(monitoring.RULES)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "nowhere").symlink_to("nothing")
    done = CliRunner().invoke(config, ["render", "grafana", "-o", str(tmp_path / "nowhere")], standalone_mode=False)
    assert "link to a file that does not exist" in str(done.exception)


def test_doctor_json_is_one_object_of_findings(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(f"[store]\nurl = 'sqlite:///{tmp_path}/none.db'\n[cluster]\nslurm_bin = '{tmp_path}'\n")
    done = migbatch("doctor", "--json", "-c", str(path))
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert {"level", "subject", "text", "advice"} == set(findings[0])
    assert all(f["advice"] for f in findings if f["level"] != "ok")
    assert cli.name == "cli"
