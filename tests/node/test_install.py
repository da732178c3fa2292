"""The hook programs as installed, and when they must refuse to run as root."""

import ast
import os
import py_compile
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from slurm_migbatch.cli.install import install as install_command
from slurm_migbatch.cli.node import node as node_commands
from slurm_migbatch.node import exits, install
from slurm_migbatch.node.install import InstallError
from tests.support.nodes import ALICE

ROOT = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from pathlib import Path
from slurm_migbatch.node.install import programs
for path, text in programs(Path(sys.argv[1]), Path(sys.argv[2]), sys.executable):
    path.write_text(text)
    path.chmod(0o755)
"""


def words_of(node, hooks, etc):
    """Return the options of `migbatch install --role node` for these directories."""
    (node.root / "slurm.conf").write_text("SlurmctldHost=ctl\n")
    places = {"hooks": hooks, "etc": etc, "systemd": node.root / "systemd", "record": node.root / "record"}
    words = [str(part) for name, path in places.items() for part in (f"--{name}", path)]
    return [*words, "--role", "node", "--slurm-conf", str(node.root / "slurm.conf"), "--python", sys.executable]


@pytest.fixture
def installed(node):
    """A node with its hooks installed."""
    node.hooks = node.root / "hooks"
    install_command.main([*words_of(node, node.hooks, node.etc), "--apply"], standalone_mode=False)
    node.forget_executor()
    return node


def run(node, hook, job, marker="", **values):
    return subprocess.run(
        [str(node.hooks / hook)],
        env=node.environ("prolog" if hook == "task_prolog" else hook, job, marker, **values),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_hook_of_enroot_runs_as_installed(installed):
    """It is written where Enroot's settings are, as a site that adds Enroot later does by the same command."""
    (installed.root / "enroot").mkdir()
    words = words_of(installed, installed.hooks, installed.etc)
    install_command.main([*words, "--apply"], standalone_mode=False)
    installed.prolog(1, "[mig:1g.10gb:1]")
    hook = installed.root / "enroot/hooks.d/50-migbatch.sh"
    environment, mounts = installed.root / "environment", installed.root / "fstab"
    environment.touch()
    values = {"SLURM_JOB_ID": "1", "SLURM_JOB_UID": str(ALICE), "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}
    values |= {"ENROOT_ENVIRON": str(environment), "ENROOT_MOUNTS": str(mounts)}
    done = subprocess.run([str(hook)], env=values, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "CUDA_VISIBLE_DEVICES=MIG-" in environment.read_text() and mounts.read_text()
    program = str(installed.root / "migbatch-task_prolog")
    assert (installed.root / "enroot/mounts.d/50-migbatch.fstab").read_text().split()[:2] == [program] * 2
    install_command.main([*words, "--uninstall", "--apply"], standalone_mode=False)
    assert not hook.exists()


def checked_in(hook):
    return ROOT / ("epilog" if hook == "epilog" else "prolog") / hook


@pytest.mark.parametrize("hook", install.HOOKS)
def test_checked_in_hooks_match_the_rendered_ones(hook):
    path = checked_in(hook)
    assert path.read_text() == install.example(hook), "write install.example(hook) there"
    assert os.access(path, os.X_OK)


@pytest.fixture
def environment(node):
    """A virtual environment as on a node: the packages of the extra `node` in its own site-packages."""
    home = node.root / "opt"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (place,) = home.glob("lib/python3.*/site-packages")
    for package in ("node", "mig"):
        shutil.copytree(ROOT / "slurm_migbatch" / package, place / "slurm_migbatch" / package)
    shutil.copy(ROOT / "slurm_migbatch/__init__.py", place / "slurm_migbatch")
    shutil.copy(pynvml.__file__, place)
    return home


@pytest.mark.parametrize("umask", [0o077, 0o000], ids=oct)
def test_installed_file_modes_do_not_depend_on_roots_umask(node, environment, monkeypatch, umask):
    """Users run TaskProlog, and only root may write what root's hooks load."""
    (place,) = environment.glob("lib/python3.*/site-packages")
    monkeypatch.setattr(install, "package_paths", lambda: [str(place)])
    packages = place / "slurm_migbatch"
    made_once = Path(py_compile.compile(str(packages / "node/paths.py"), doraise=True))
    made_once.chmod(0o666)
    (packages / "mig/__pycache__").mkdir(exist_ok=True)
    (packages / "mig/__pycache__").chmod(0o700)
    os.umask(umask)
    words = words_of(node, node.root / "above/hooks", node.root / "above/etc")
    install_command.main([*words, "--apply"], standalone_mode=False)
    made = [node.root / "above", *(node.root / "above").rglob("*")]
    made += [*place.glob("**/__pycache__"), *place.glob("**/*.pyc")]
    wrong = {str(path): oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o022 or not readable(path)}
    assert not wrong


def test_install_writes_nothing_without_apply_and_byte_code_with_it(node, environment, monkeypatch):
    """`migbatch install --role node` first shows what it would do."""
    (place,) = environment.glob("lib/python3.*/site-packages")
    monkeypatch.setattr(install, "package_paths", lambda: [str(place)])
    compiled = Path(py_compile.compile(str(place / "slurm_migbatch/node/paths.py"), doraise=True))
    compiled.chmod(0o666)
    words = words_of(node, node.root / "new/hooks", node.root / "new/etc")

    def state():
        found = {path: path.lstat() for path in node.root.rglob("*")}
        return {path: (status.st_ino, status.st_mode, status.st_ctime_ns) for path, status in found.items()}

    before = state()
    install_command.main(words, standalone_mode=False)
    assert state() == before
    install_command.main([*words, "--apply"], standalone_mode=False)
    assert compiled.stat().st_mode & 0o022 == 0
    assert len(list(place.glob("slurm_migbatch/node/__pycache__/*.pyc"))) > 10


def test_hooks_are_installed_by_the_command_that_records_them():
    named = set(re.findall(r"`(migbatch [a-z ]+)", "".join(map(install.example, install.HOOKS))))
    named |= set(re.findall(r"`(migbatch [a-z ]+)", install.render("prolog", ["/x"], "/etc/migbatch", "/bin/python3")))
    assert named == {"migbatch install "}
    assert "install" not in node_commands.commands


def test_byte_code_compiler_that_hangs_is_ended(tmp_path, monkeypatch):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(install, "COMPILE_S", 0.2)
    monkeypatch.setattr(install, "package_paths", lambda: [str(tmp_path)])
    with pytest.raises(InstallError, match=r"timed out after 0\.2 seconds"):
        install.compile_imports(str(python))


def readable(path):
    needed = 0o055 if path.is_dir() else 0o044
    return path.stat().st_mode & needed == needed


def test_checked_in_hooks_work_in_a_virtual_environment(node, environment):
    """Only the two directories are replaced by those of this test."""
    node.hooks = node.root / "hooks"
    node.hooks.mkdir()
    for hook in install.HOOKS:
        text = checked_in(hook).read_text()
        text = text.replace(install.DEFAULT_HOME, str(environment)).replace(install.DEFAULT_ETC, str(node.etc))
        (node.hooks / hook).write_text(text)
        (node.hooks / hook).chmod(0o755)
    node.forget_executor()
    done = run(node, "prolog", 1, "[mig:1g.10gb:1]", uid=0)
    assert (done.returncode, done.stderr) == (exits.OK, "") and "job 1 run 0" in done.stdout
    task = run(node, "task_prolog", 1)
    assert task.returncode == 0 and task.stdout.startswith("export CUDA_VISIBLE_DEVICES=MIG-")
    done = run(node, "epilog", 1, uid=0)
    assert (done.returncode, done.stderr) == (exits.OK, "")


@pytest.mark.parametrize("hook", install.HOOKS)
def test_installed_hooks_differ_from_the_checked_in_ones_only_in_paths(node, environment, hook):
    python = environment / "bin/python3"
    (node.root / "hooks").mkdir()
    subprocess.run([python, "-c", WRITE, str(node.root / "hooks"), str(node.etc)], check=True, cwd="/", env={})
    written, kept = (path.read_text() for path in (node.root / "hooks" / hook, checked_in(hook)))
    trees = [ast.parse(text) for text in (written, kept)]
    places = []
    for tree in trees:
        values = {}
        for line in tree.body:
            if isinstance(line, ast.Assign):
                exec(compile(ast.Module([line], []), hook, "exec"), {"sys": sys}, values)
        places.append(values)
        tree.body = [line for line in tree.body[1:] if not isinstance(line, ast.Assign)]
    assert ast.dump(trees[0]) == ast.dump(trees[1])
    assert places[0] == {
        "PATHS": tuple(path.replace(install.DEFAULT_HOME, str(environment)) for path in places[1]["PATHS"]),
        "ETC": str(node.etc),
    }
    assert written.splitlines()[0] == f"#!{python} -ISB"
    assert kept.splitlines()[0] == f"#!{install.DEFAULT_PYTHON} -ISB"


def test_installing_twice_changes_nothing(installed, capsys):
    settings = (installed.etc / "node.conf").read_text()
    capsys.readouterr()
    install_command.main([*words_of(installed, installed.hooks, installed.etc), "--apply"], standalone_mode=False)
    assert "\n0 files and directories changed\n" in capsys.readouterr().out
    assert (installed.etc / "node.conf").read_text() == settings


def test_configuration_is_written_where_none_exists(node):
    words = words_of(node, node.root / "new/hooks", node.root / "new/etc")
    install_command.main([*words, "--apply"], standalone_mode=False)
    assert "Controller=http://ctl:6830" in (node.root / "new/etc/node.conf").read_text()


def test_installed_hooks_start_and_end_a_job(installed):
    done = run(installed, "prolog", 1, "[mig:1g.10gb:2]", uid=0)
    assert (done.returncode, done.stderr) == (exits.OK, "") and "job 1 run 0" in done.stdout
    task = run(installed, "task_prolog", 1)
    assert task.returncode == 0 and task.stdout.startswith("export CUDA_VISIBLE_DEVICES=MIG-")
    done = run(installed, "epilog", 1, uid=0)
    assert (done.returncode, done.stderr) == (exits.OK, "")
    installed.check()


def test_a_task_of_a_refused_job_fails_with_the_reason(installed):
    run(installed, "prolog", 1, "[mig:9g.99gb:1]", uid=0)
    task = run(installed, "task_prolog", 1)
    assert task.returncode == exits.NO_SLICE and "no GPU slice for this job" in task.stdout + task.stderr
    assert "export" not in task.stdout


def test_task_fails_and_says_so_when_its_job_cannot_be_requeued(installed):
    run(installed, "prolog", 1, "[mig:9g.99gb:1]", uid=0)
    (installed.root / "bin/scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    installed.configure(ScontrolTimeout=0.2)
    task = run(installed, "task_prolog", 1)
    assert task.returncode == exits.NO_SLICE
    refusal, requeue = task.stdout.splitlines()
    assert refusal.startswith("print migbatch: no GPU slice for this job")
    assert requeue.startswith("print migbatch: the job was not requeued") and "within 0.2 s" in requeue
    assert [f"print {line}" for line in task.stderr.splitlines()] == [refusal, requeue]


def test_hooks_ignore_a_job_without_a_marker(installed):
    for hook in ("prolog", "epilog", "task_prolog"):
        done = run(installed, hook, 7)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("what", ["etc", "node.conf"])
def test_hooks_refuse_a_configuration_that_others_can_write(installed, what):
    target = installed.etc if what == "etc" else installed.etc / "node.conf"
    target.chmod(target.stat().st_mode | 0o022)
    done = run(installed, "prolog", 1, "[mig:1g.10gb:1]")
    assert done.returncode == exits.INSTALLATION and "writable by nobody else" in done.stderr
    assert installed.machine.dump()["gpus"][0]["instances"] == []


def test_hooks_refuse_a_configuration_owned_by_another_user(installed):
    os.chown(installed.etc / "node.conf", ALICE, ALICE)
    done = run(installed, "prolog", 1, "[mig:1g.10gb:1]")
    assert done.returncode == exits.INSTALLATION


def test_hooks_refuse_a_package_that_others_own_or_can_write(installed, tmp_path):
    """A copy of the package is made writable by all, because the real one must not be."""
    elsewhere = tmp_path / "lib" / "slurm_migbatch"
    for package in ("node", "mig"):
        (elsewhere / package).mkdir(parents=True)
    (elsewhere / "node" / "client.py").write_text("def main(*args): print('ran')\n")
    text = install.render("prolog", [str(tmp_path / "lib")], str(installed.etc), sys.executable)
    (installed.hooks / "prolog").write_text(text)
    assert run(installed, "prolog", 1).stdout == "ran\n"
    (elsewhere / "node").chmod(0o777)
    assert run(installed, "prolog", 1).returncode == exits.INSTALLATION
    (elsewhere / "node").chmod(0o755)
    os.chown(elsewhere, ALICE, ALICE)
    assert run(installed, "prolog", 1).returncode == exits.INSTALLATION


@pytest.mark.parametrize("what", ["bin", "."])
def test_an_interpreter_that_others_can_replace_is_refused(node, environment, what):
    """It is a link to root's interpreter, beside pyvenv.cfg, which sets where the standard library is."""
    (environment / what).chmod(0o777)
    with pytest.raises(InstallError, match="writable by others"):
        install.programs(node.root / "hooks", node.etc, str(environment / "bin/python3"))


@pytest.mark.parametrize("what", ["pynvml.py", "slurm_migbatch/__init__.py", "slurm_migbatch/mig/nvml/gpu.py"])
def test_a_module_that_others_can_change_is_refused(node, environment, monkeypatch, what):
    """The file itself is writable, in a directory that is not."""
    (place,) = environment.glob("lib/python3.*/site-packages")
    monkeypatch.setattr(install, "package_paths", lambda: [str(place)])
    (place / what).chmod(0o666)
    with pytest.raises(InstallError, match=f"{what} is writable by others"):
        install.programs(node.root / "hooks", node.etc, sys.executable)
    (place / what).chmod(0o644)
    os.chown(place / what, ALICE, ALICE)
    with pytest.raises(InstallError, match=f"{what} belongs to uid {ALICE}"):
        install.programs(node.root / "hooks", node.etc, sys.executable)


def test_hooks_report_a_missing_package(installed, tmp_path):
    text = install.render("prolog", [str(tmp_path / "gone")], str(installed.etc), sys.executable)
    until = "until = time.monotonic() + 10.0"
    assert until in text
    (installed.hooks / "prolog").write_text(text.replace(until, "until = time.monotonic() + 0.5"))
    done = run(installed, "prolog", 1, "[mig:1g.10gb:1]")
    assert done.returncode == exits.INSTALLATION and "run `migbatch install --role node --apply`" in done.stderr


def test_installer_refuses_an_unsafe_directory_or_interpreter(tmp_path):
    dest = tmp_path / "hooks"
    dest.mkdir()
    dest.chmod(0o777)
    with pytest.raises(InstallError, match="chmod go-w"):
        install.programs(dest, tmp_path / "etc", sys.executable)
    with pytest.raises(InstallError, match="absolute"):
        install.programs(tmp_path / "x", tmp_path / "etc", "python3")
    with pytest.raises(InstallError, match="no such interpreter"):
        install.programs(tmp_path / "x", tmp_path / "etc", "/nonexistent/python3")


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "BASH_ENV"])
def test_environment_variables_cannot_inject_code_into_a_hook(installed, variable, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "posix.py").write_text("raise SystemExit('evil')")
    (tmp_path / "evil" / "sitecustomize.py").write_text("raise SystemExit('evil')")
    value = str(tmp_path / "evil") if variable.startswith("PYTHON") else str(tmp_path / "evil" / "lib.so")
    done = run(installed, "prolog", 1, "[mig:1g.10gb:1]", **{variable: value})
    assert done.returncode == 0 and "job 1 run 0" in done.stdout
    assert "evil" not in done.stderr.replace(value, "")


@pytest.mark.parametrize(
    "text",
    ["$(touch {})", "`touch {}`", "; touch {} #", "' && touch {} '", "\n touch {}", "../../{}", "%n%s%d", "\x1b[31m"],
)
def test_job_comment_is_never_executed(installed, text, tmp_path):
    proof = tmp_path / "proof"
    evil = text.format(proof)
    done = run(installed, "prolog", 1, SLURM_JOB_COMMENT=f"{evil} [mig:1g.10gb:1]", SLURM_JOB_ACCOUNT=evil)
    assert done.returncode == 0, done
    assert not proof.exists()
    assert installed.events("start")[0]["account"] == ""


IMPORTS = """
import sys
sys.path[:0] = {paths!r}
import {module}
{work}
print(" ".join(sorted(name for name in sys.modules if sys.modules[name] is not None)))
"""


def modules(module, work="", isolated="-ISB"):
    code = IMPORTS.format(paths=install.package_paths(), module=module, work=work)
    done = subprocess.run([sys.executable, isolated, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


BARE = ["slurm_migbatch", "slurm_migbatch.node", "slurm_migbatch.node.conf", "slurm_migbatch.node.exits", "__future__"]


@pytest.mark.parametrize("module", ["client", "task_prolog"])
def test_client_and_task_prolog_import_almost_no_modules(module):
    bare = subprocess.run(
        [sys.executable, "-ISB", "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True
    )
    more = modules(f"slurm_migbatch.node.{module}") - set(bare.stdout.split())
    assert more == {*BARE, f"slurm_migbatch.node.{module}"}


def test_hook_of_enroot_imports_only_task_prolog():
    more = modules("slurm_migbatch.node.enroot") - modules("slurm_migbatch.node.task_prolog")
    assert more == {"slurm_migbatch.node.enroot"}


def test_node_package_imports_only_the_standard_library_and_pynvml():
    everything = [f"slurm_migbatch.node.{path.stem}" for path in (ROOT / "slurm_migbatch" / "node").glob("*.py")]
    work = "\n".join(f"import {name}" for name in [*everything, "slurm_migbatch.mig.nvml"])
    loaded = modules("slurm_migbatch", work)
    foreign = {
        name.partition(".")[0]
        for name in loaded
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("_")
    }
    assert foreign <= {"slurm_migbatch", "pynvml"}
    packages = {name.split(".")[1] for name in loaded if name.startswith("slurm_migbatch.")}
    assert packages == {"node", "mig"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "incomplete"])
def test_hook_waits_while_its_package_is_upgraded(node, environment, how):
    """pip removes the old files first, and writes the new ones in place; a hook that fails drains the node."""
    (client,) = environment.glob("lib/python3.*/site-packages/slurm_migbatch/node/client.py")
    node.hooks = node.root / "hooks"
    node.hooks.mkdir()
    arguments = [environment / "bin/python3", "-c", WRITE, str(node.hooks), str(node.etc)]
    subprocess.run(arguments, check=True, cwd="/", env={})
    node.forget_executor()
    text = client.read_text()
    if how == "missing":
        client.parent.rename(client.parent.with_name("away"))
    else:
        client.write_text(text[: text.index("def main") + 10])
    prolog = subprocess.Popen(
        [str(node.hooks / "prolog")],
        env=node.environ("prolog", 1, "[mig:1g.10gb:1]", uid=0),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(0.5)
    if how == "missing":
        client.parent.with_name("away").rename(client.parent)
    else:
        client.write_text(text)
    out, err = prolog.communicate(timeout=60)
    assert (prolog.returncode, err) == (exits.OK, "") and "job 1 run 0" in out
