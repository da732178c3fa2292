"""A Slurm site as an administrator would set it up by hand, on "machines": mount, UTS and network namespaces.

Every machine has its own /etc, /var and /opt (overlays) and /run; with --slurm-root everything is that Debian's except
what the tests' Python needs. /etc/slurm is shared, as on many sites, and each machine has its own address on a private
network. Processes, users and cleanup are those of a test bed, but not the configuration: the files in tests/site/stock
are copied unchanged.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_migbatch.site import render
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.running_cluster import write_private
from slurm_migbatch.testbed.simdriver import SimulatedMachine

ROOT = Path(__file__).resolve().parents[2]
STOCK = ROOT / "tests/site/stock"
DOCUMENT = ROOT / "docs/install.md"
#: machine -> models of its GPUs
GPUS: Mapping[str, tuple[str, ...]] = {
    "ctl": (),
    "h1": ("h100-80gb", "h100-80gb"),
    "h2": ("h100-80gb", "h100-80gb"),
    "m1": ("a100-40gb", "a30"),
    "c1": (),
    "login": (),
}
NODES = ("h1", "h2", "m1", "c1")
GPU_NODES = ("h1", "h2", "m1")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NETWORK = "ip link set lo up; ip link add br0 type bridge && ip link set br0 up && echo ready && exec sleep infinity"
#: connects a machine to the network; arguments: pid of the process that holds it, its name, its address
_PLUG = """set -e
ip link add "to-$1" type veth peer name eth0 netns "$0"
ip link set "to-$1" master br0 up
nsenter --target "$0" --net sh -c "ip link set lo up; ip addr add $2/24 dev eth0; ip link set eth0 up"
"""
_ADDRESSES = {
    name: f"10.7.1.{number}"
    for name, number in (
        *(("ctl", 9), ("ctl2", 8), ("db1", 7)),
        *(("login", 10), ("h1", 1), ("h2", 2), ("m1", 3), ("c1", 4)),
    )
}
#: creates a machine; if $3 names a Debian, with its files, and with the paths of this machine in $4 and later
_MACHINE = """set -e
bed="$0" me="$1" names="$2" debian="$3" root=
shift 3
if [ -n "$debian" ]; then
    root="$bed/hosts/$me/root"
    mkdir -p "$root" "$bed/hosts/$me/upper" "$bed/hosts/$me/work"
    mount -t overlay "$me" -o "lowerdir=$debian,upperdir=$bed/hosts/$me/upper,workdir=$bed/hosts/$me/work" "$root"
    cp /etc/passwd /etc/group "$root/etc"
    for path in /proc /sys /dev /tmp "$@"; do
        if [ -d "$path" ]; then mkdir -p "$root$path"; else touch "$root$path"; fi
        mount --rbind "$path" "$root$path"
    done
else
    for folder in etc var opt; do
        upper="$bed/hosts/$me/$folder" work="$bed/hosts/$me/$folder.work"
        mkdir -p "$upper" "$work"
        mount -t overlay "$me-$folder" -o "lowerdir=/$folder,upperdir=$upper,workdir=$work" "/$folder"
    done
fi
devices="$bed/nodes/$me/driver/dev"
if [ -d "$devices" ]; then mount -t overlay "$me-dev" -o "lowerdir=$devices:/dev" "$root/dev"; fi
mount -t tmpfs -o mode=755 run "$root/run"
mkdir -p "$root/run/munge" "$root/etc/slurm"
mount --bind "$bed/munge" "$root/run/munge"
mount --bind "$bed/slurm" "$root/etc/slurm"
hostname "$me"
printf '%s\n' 127.0.0.1+localhost $names | tr + ' ' > "$root/etc/hosts"
mkdir -p "$root/var/log/slurm" "$root/var/spool/slurmctld" "$root/var/spool/slurmd"
chown slurm: "$root/var/log/slurm"
mount --bind "$bed/state" "$root/var/spool/slurmctld"
echo ready
exec chroot "${root:-/}" sleep infinity
"""


class StockSite(Cluster):
    """The machines of the site, with a running Slurm; `with StockSite(slurm_root) as site:`."""

    #: the machines of _ADDRESSES that exist
    hosts: Sequence[str] = ("ctl", "login", *NODES)
    controllers: Sequence[str] = ("ctl",)
    #: what the files hold that commands of docs/install.md read by `< FILE`
    inputs: Mapping[str, str] = {}
    #: replacements in the site's files
    edits: Mapping[str, str] = {}

    def __init__(self, slurm_root: str = "") -> None:
        super().__init__(Path(f"/tmp/migbatch-site-{secrets.token_hex(3)}"), users=1, slurm_root=slurm_root)

    @property
    def nodes(self) -> Sequence[str]:
        """The compute nodes that exist."""
        return [host for host in self.hosts if host in NODES]

    # --- machines

    def on(
        self,
        host: str,
        command: str | Sequence[str],
        user: str | None = None,
        *,
        codes: tuple[int, ...] = (0,),
        content: str = "",
    ) -> str:
        """Run a shell line or a program on a machine, in a checkout of this repository; return its output.

        `content` is its standard input.

        Raises:
            AssertionError: the exit status is not one of `codes`.
        """
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        cwd = self.home(user) if user else ROOT
        if user:
            account = self.user(user)
            argv = ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups", "--", *argv]
        done = subprocess.run(
            self.daemons.group.enter(self._inside(host, argv, cwd)),
            check=False,
            env=self._environment(),
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode in codes, f"{host}: {command}: exit {done.returncode}:\n{done.stdout}"
        return done.stdout

    def follow(self, heading: str, *hosts: str, user: str | None = None) -> str:
        """Run the commands below a heading of docs/install.md on machines, one machine after the other."""
        return "".join(self.carry_out(host, line, user) for host in hosts for line in commands(heading))

    def carry_out(self, host: str, line: str, user: str | None = None) -> str:
        """Run one command of the document; simulate `pip` and `systemctl`, with their effects."""
        words, content = shlex.split(line), ""
        if words[-2:-1] == ["<"]:
            words, content = words[:-2], self.inputs[words[-1]]
        if words[0].endswith("/pip"):
            return self._pip(host, Path(words[0]).parents[1])
        if words[0] == "systemctl":
            return self._systemctl(host, *words[1:])
        if words[:3] == ["python3", "-m", "venv"]:
            # the controller has compiled packages of the tests' own Python, which users may not be able to run
            python = sys.executable if host in self.controllers else "/usr/bin/python3"
            words = [python, "-m", "venv", "--without-pip", *words[3:]]
        shows = words[1:2] == ["install"] and "--apply" not in words
        return self.on(host, words, user, codes=(0, 1) if shows else (0,), content=content)

    def _pip(self, host: str, environment: Path) -> str:
        """Install the wheel of this checkout; its dependencies are those of the tests, and nothing is downloaded.

        Further hosts with the same Python get a copy: pip would compile every module again.
        """
        installed = self.directory / f"installed-{'controller' if host in self.controllers else 'others'}.tar"
        if installed.exists():
            return self.on(host, f"tar -xf {installed} -C {environment}")
        pip = [sys.executable, "-m", "pip", "-q", "--python", str(environment / "bin/python"), "install"]
        output = self.on(host, [*pip, "--no-deps", "--no-index", str(self._wheel())])
        packages = sysconfig.get_path("purelib")
        change_directory = f"cd {environment}/lib/python3*/site-packages"
        self.on(host, f"{change_directory} && cp {packages}/pynvml.py . && echo {packages} > needed.pth")
        self.on(host, f"tar -cf {installed} -C {environment} .")
        return output

    def _wheel(self) -> Path:
        folder = self.directory / "wheel"
        if not folder.exists():
            source = self.directory / "checkout"
            ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")
            shutil.copytree(ROOT, source, ignore=ignored)
            code = "import sys; from setuptools.build_meta import build_wheel as b; b(sys.argv[1])"
            done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        (path,) = folder.glob("*.whl")
        return path

    # --- services

    def _systemctl(self, host: str, verb: str, *words: str) -> str:
        """Do what systemd would do with a unit of migbatch, or with one of Slurm's daemons."""
        names = [word.removesuffix(".service") for word in words if not word.startswith("-")]
        for name in names:
            if verb == "disable":
                self.stop(f"{name}-{host}")
                self._forget(f"{name}-{host}")
            elif verb == "restart":
                self.restart(f"{name}-{host}")
                self.wait(f"{name} on {host}", lambda name=name: self._answers(host, name))  # type: ignore[misc]
            else:
                self._start_unit(host, name)
        return ""

    def crash(self, host: str, *names: str) -> None:
        """Kill services of a host; they are not restarted."""
        for name in names:
            self.kill(f"{name}-{host}")
            self._forget(f"{name}-{host}")

    def _forget(self, name: str) -> None:
        (self.directory / "run/procs" / f"{name}.json").unlink()

    def _answers(self, host: str, name: str) -> bool:
        """Return whether slurmctld answers, or the slurmd of a node has registered with slurmctld."""
        if name == "slurmctld":
            return any(f"at {host} is UP" in line for line in self.on(host, "scontrol ping", codes=(0, 1)).splitlines())
        state = self.on("ctl", f"sinfo -h -N -p all -n {host} -o %T", codes=(0, 1)).strip()
        return state in ("idle", "mixed", "allocated")

    def _start_unit(self, host: str, name: str) -> None:
        if name == "migbatch-node":
            self._simulate(host)
        unit = self.on(host, f"cat /etc/systemd/system/{name}.service")
        lines = [line.partition("=")[::2] for line in unit.splitlines() if re.match(r"[A-Z]\w*=", line)]
        values = dict(lines)
        user = values.get("User", "root")
        for key, base in (("StateDirectory", "/var/lib"), ("RuntimeDirectory", "/run")):
            if key in values:
                self.on(host, f"mkdir -p -m 755 {base}/{values[key]} && chown {user} {base}/{values[key]}")
        for key, line in lines:
            if key == "ExecStartPre":
                self.on(host, line.removeprefix("+"))
        argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        capabilities = " ".join(value for key, value in lines if key == "CapabilityBoundingSet").lower().split()
        argv += ["--bounding-set", ",".join(["-all", *(f"+{name.removeprefix('cap_')}" for name in capabilities)])]
        argv += [*(["--no-new-privs"] if values.get("NoNewPrivileges") == "yes" else []), "--"]
        line = f"umask {values['UMask']}; exec {shlex.join(argv)} {values['ExecStart']}"
        self._spawn_on(host, name, ["/bin/sh", "-c", line])
        if name == "migbatchd":
            health = "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:6830/healthz\")'"
            self.wait("migbatchd", lambda: "Error" not in self.on(host, health, codes=(0, 1)))

    def _spawn_on(self, host: str, name: str, argv: Sequence[str]) -> None:
        self.daemons.start(f"{name}-{host}", self._inside(host, argv), self._environment())

    def _inside(self, host: str, argv: Sequence[str], where: Path = ROOT) -> list[str]:
        daemon = self.daemons.get(f"machine-{host}")
        assert daemon is not None
        enter = ["nsenter", f"--target={daemon.pid}", "--mount", "--uts", "--net", "--root", f"--wdns={where}"]
        return [*enter, "--", *argv]

    def _environment(self) -> dict[str, str]:
        base = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "HOME": "/root"}
        return {
            **base,
            **{key: value for key, value in self.client_env().items() if key.startswith("MIGBATCH_TESTBED")},
        }

    # --- up

    def _prepare(self) -> None:
        for folder in ("log", "run/procs", "munge", "slurm/prolog.d", "hosts", "nodes", "state"):
            (self.directory / folder).mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.chown(self.directory / "state", "slurm")
        for host in set(GPU_NODES) & set(self.hosts):
            SimulatedMachine.create(self.node_directory(host) / "driver", list(GPUS[host]), latency=0.0)
        for path in STOCK.iterdir():
            target = self.directory / "slurm" / path.name
            if path.name.startswith("prolog-"):
                target = target.with_name("prolog.d") / path.name.removeprefix("prolog-")
            text = path.read_text()
            for old, new in self.edits.items():
                text = text.replace(old, new)
            target.write_text(text)
            target.chmod(0o755 if path.suffix == ".sh" else 0o644)
        # as far as this machine allows
        cgroup = render("cgroup.conf.j2", version=self.root.version(), constrained=False)
        (self.directory / "slurm/cgroup.conf").write_text(cgroup)
        for user in self.users:
            self.home(user.name).mkdir(parents=True)
            os.chown(self.home(user.name), user.uid, user.gid)
        write_private(self.directory / "munge/key", secrets.token_bytes(1024))

    def _start(self) -> None:
        munge = self.directory / "munge"
        options = [f"--{word}-file={munge}/{word}" for word in ("key", "pid", "log", "seed")]
        options.append(f"--socket={munge}/munge.socket.2")
        self.spawn("munged", ["/usr/sbin/munged", "--foreground", *options])
        self.spawn("network", ["unshare", "--net", "/bin/sh", "-c", _NETWORK])
        self.wait("the network", lambda: "ready" in self.daemons.tail("network"))
        network = self.daemons.get("network")
        assert network is not None
        names = " ".join(f"{address}+{host}" for host, address in _ADDRESSES.items())
        needed = [str(ROOT), str(Path(sys.prefix).resolve()), *_python()]  # ROOT may have a link to the second
        unshare = ["unshare", "--mount", "--uts", "--net", "--propagation", "private", "/bin/sh", "-c", _MACHINE]
        for host in self.hosts:
            address = _ADDRESSES[host]
            arguments = [str(self.directory), host, names, self._debian(host), *needed]
            machine = self.spawn(f"machine-{host}", [*unshare, *arguments])
            self.wait(host, lambda host=host: "ready" in self.daemons.tail(f"machine-{host}"))  # type: ignore[misc]
            plug = ["/bin/sh", "-c", _PLUG, str(machine.pid), host, address]
            self.run_here(["nsenter", f"--target={network.pid}", "--net", *plug])
        for host in self.controllers:
            self._spawn_on(host, "slurmctld", ["/usr/sbin/slurmctld", "-D"])
            self.wait("slurmctld", lambda host=host: self._answers(host, "slurmctld"))  # type: ignore[misc]
        for node in self.nodes:
            self._spawn_on(node, "slurmd", self._slurmd())
        for node in self.nodes:
            self.wait(node, lambda node=node: self._answers(node, "slurmd"))  # type: ignore[misc]

    def _slurmd(self) -> list[str]:
        """Return the command line that starts slurmd."""
        return ["/usr/sbin/slurmd", "-D"]

    def _debian(self, host: str) -> str:
        """Return the directory of a machine's Debian; empty for that of this host."""
        return str(self.root.path or "")

    def _simulate(self, host: str) -> None:
        """Configure the location of a machine's simulated driver; a real one is found at NVIDIA's default path."""
        driver = self.node_directory(host) / "driver"
        values = {
            "NvmlLibrary": driver / "libnvidia-ml.so.1",
            "ProcRoot": driver / "proc",
            "DevRoot": driver / "dev",
            "BootIdFile": driver / "boot_id",
        }
        text = "".join(f"{key}={value}\n" for key, value in values.items())
        self.on(host, f"cat >> /etc/migbatch/node.conf <<'E'\n{text}E\n")


def _python() -> list[str]:
    """Return the paths of the tests' Python that its virtual environment refers to."""
    if sys.base_prefix != "/usr":
        return [sys.base_prefix]
    return [str(Path(sys.executable).resolve()), sysconfig.get_path("stdlib")]


def commands(heading: str) -> list[str]:
    """Return the commands below a heading of docs/install.md."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"docs/install.md has no heading {heading!r}"
    return [line for block in re.findall(r"```sh\n(.*?)```", match[1], re.DOTALL) for line in block.splitlines()]


def headings() -> list[str]:
    """Return the headings of docs/install.md that have commands, in their order."""
    return [line[3:] for line in DOCUMENT.read_text().splitlines() if line.startswith("## ") and commands(line[3:])]
