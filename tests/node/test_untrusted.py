"""Any input that users or strangers can influence: parsers return correct values or raise their own errors only."""

import errno
import posix
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.node import client, protocol
from slurm_migbatch.node.conf import ConfError, read
from slurm_migbatch.node.config import load
from slurm_migbatch.node.hookenv import HookEnv, HookEnvError
from slurm_migbatch.node.plan import PlanError, parse
from slurm_migbatch.node.scontrol import ScontrolError, grant_of

GOOD = {b"SLURM_JOB_ID": b"17", b"SLURM_JOB_UID": b"1000", b"SLURMD_NODENAME": b"n1"}
no_nul = st.binary(max_size=60).map(lambda raw: raw.replace(b"\0", b""))
hooks = st.sampled_from(["prolog", "epilog"])


@given(hooks, st.dictionaries(st.sampled_from(client.ALLOWED), no_nul))
def test_any_hook_environment_is_parsed_or_refused(hook, environ):
    try:
        env = HookEnv.read(hook, environ)
    except HookEnvError as error:
        assert str(error).isprintable()
        return
    assert 0 < env.job < 1 << 32 and 0 <= env.uid < (1 << 32) - 1
    for text in (env.node, env.user, env.account, env.partition):
        assert text.isascii() and len(text) <= 64 and not set(text) & set(" /\n'\"$`;|&<>\\")
    assert env.restart is None or 0 <= env.restart < 1 << 16


@given(hooks, st.dictionaries(st.sampled_from(client.ALLOWED), no_nul))
def test_agent_reads_a_request_as_the_hook_sent_it(hook, values):
    environ = GOOD | {k: v for k, v in values.items() if k in (b"SLURM_JOB_COMMENT", b"SLURM_JOB_USER")}
    assert protocol.parse(client.encode(hook, environ)) == HookEnv.read(hook, environ)


@given(st.binary(max_size=200))
def test_malformed_request_on_the_socket_is_refused(request):
    for raw in (request, request + b"\0\0", b"prolog\0" + request + b"\0\0"):
        with pytest.raises(HookEnvError):
            protocol.parse(raw)


@pytest.mark.parametrize(
    "extra",
    [b"LD_PRELOAD=/tmp/x", b"SLURM_JOB_ID=18", b"PATH=/tmp", b"SLURM_JOB_WORK_DIR=/tmp", b"noequals"],
)
def test_request_with_unknown_or_repeated_variables_is_refused(extra):
    fields = [key + b"=" + value for key, value in GOOD.items()]
    assert protocol.parse(b"\0".join([b"prolog", *fields]) + b"\0\0").job == 17
    with pytest.raises(HookEnvError):
        protocol.parse(b"\0".join([b"prolog", *fields, extra]) + b"\0\0")


@given(st.integers(0, 255), st.text(max_size=300))
def test_reply_is_decoded_as_it_was_encoded(code, line):
    assert client.decode(protocol.reply(code, line)) == (
        code,
        " ".join(line.split())[:2000].encode("utf-8", "backslashreplace").decode().strip(),
    )


@given(st.binary(max_size=30))
def test_any_reply_has_a_valid_exit_code_or_is_refused(reply):
    try:
        code, _ = client.decode(reply)
    except ValueError:
        return
    assert 0 <= code <= 255


@pytest.mark.parametrize("reply", [b"", b"0", b"-1\nx", b"256\nx", b"0x1\n", b"\n", b"abc\n", b"1000\n"])
def test_truncated_reply_is_refused(reply):
    with pytest.raises(ValueError, match="truncated"):
        client.decode(reply)


@pytest.mark.parametrize("context", [b"epilog_slurmd", b"prolog_slurmctld", b"", b"x" * 100])
def test_hook_started_in_another_context_refuses(context):
    with pytest.raises(HookEnvError, match="was started as"):
        HookEnv.read("prolog", GOOD | {b"SLURM_SCRIPT_CONTEXT": context})


@pytest.mark.parametrize("name", [b"../n1", b"n1/x", b"", b".", b"..", b"a b", b"n" * 65, b"\xff", b"n\n1"])
def test_invalid_node_name_is_refused(name):
    if not name:
        return
    with pytest.raises(HookEnvError):
        HookEnv.read("prolog", GOOD | {b"SLURMD_NODENAME": name})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.one_of(json_values, st.fixed_dictionaries({"version": json_values, "gpus": json_values, "guests": json_values}))
)
def test_any_json_is_parsed_as_a_plan_or_refused(data):
    try:
        plan = parse(data)
    except PlanError:
        return
    assert plan.version >= 0


@given(st.text(max_size=60))
def test_any_gres_text_is_parsed_as_a_grant_or_refused(text):
    with suppress(ScontrolError):
        grant_of(text, "gres/")


@pytest.mark.parametrize(
    ("gres", "prefix", "marker"),
    [
        ("gres:mig:1g.10gb:2", "gres:", "[mig:1g.10gb:2]"),
        ("gres/mig:1g.10gb.me:1,gres/mig:2g.20gb:1", "gres/", "[mig:1g.10gb.me:1,2g.20gb:1]"),
        ("gres/mig:1g.10gb", "gres/", "[mig:1g.10gb:1]"),
        ("gres/gpu:2,gres/mig:none:3", "gres/", None),
        ("(null)", "gres/", None),
    ],
)
def test_gres_formats_of_all_slurm_releases_are_parsed(gres, prefix, marker):
    grant = grant_of(gres, prefix)
    assert (grant.marker if grant else None) == marker


@pytest.mark.parametrize("gres", ["mig:1g.10gb", "gres:mig:1g.10gb:2", "gres/gpu:0,mig:7g.80gb:1"])
def test_gres_entry_without_the_releases_prefix_is_refused(gres):
    with pytest.raises(ScontrolError, match="does not read"):
        grant_of(gres, "gres/")


@pytest.mark.parametrize("count", ["²", "\u0661", "0x1", "-1", "1_0", "9" * 5000])
def test_a_count_that_is_not_a_decimal_number_is_refused(count):
    with pytest.raises(ScontrolError, match="no profile"):
        grant_of(f"gres/mig:1g.10gb:{count}", "gres/")


def write(tmp_path, text, mode=0o644):
    path = tmp_path / "node.conf"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_configuration_fills_in_the_nodes_name(tmp_path):
    write(tmp_path, "# a comment\n\nRunDir = /run/x/%n\nHookDeadline=5 # seconds\nGpus=0, 2\nAuth=token\n")
    config = load(str(tmp_path), "n7")
    assert config.run_dir == "/run/x/n7" and config.state_dir == "/var/lib/migbatch/n7"
    assert config.hook_deadline == 5.0 and config.gpus == ("0", "2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nNope=1\n", "line 2: unknown key Nope"),
        ("HookDeadline=soon\n", "line 1: HookDeadline=soon: must be more than 0, at most 86400 seconds"),
        ("AgentWait=nan\n", "must be 0 to 86400 seconds"),
        ("HookDeadline=0\n", "line 1: HookDeadline=0: must be more than 0, at most 86400 seconds"),
        ("ScontrolTimeout=0.0\n", "must be more than 0"),
        ("ReconcileEvery=0\n", "must be more than 0"),
        ("ErrorsBeforeDrain=1.5\n", "must be a whole number, 0 to 1000"),
        ("PeerUids=0,slurm\n", "PeerUids=0,slurm: must be numbers of users"),
        ("PeerUids=-1\n", "must be numbers of users"),
        ("RunDir=run\n", "absolute"),
        ("just words\n", "line 1: write Key=Value"),
        ("WarmReuse=any\nWarmReuse=never\n", "line 2: WarmReuse is set twice"),
        ("OnError=explode\n", "requeue or drain"),
        ("WarmReuse=maybe\n", "same-user"),
        ("Controller=ftp://x\n", "http"),
        ("CheckOpenFiles=1\n", "yes or no"),
        ("Controller=http://c\nAuth=token\n", "TokenFile"),
    ],
)
def test_invalid_setting_is_refused_with_its_line_or_reason(tmp_path, text, message):
    write(tmp_path, text)
    with pytest.raises(ConfError, match=message):
        load(str(tmp_path), "n1")


@pytest.mark.parametrize("call", ["open", "fstat", "read"])
def test_configuration_that_its_nfs_server_has_replaced_is_read_again(tmp_path, monkeypatch, call):
    """A failing Prolog drains the node."""
    write(tmp_path, "HookDeadline=5\n")
    real, failures = getattr(posix, call), [OSError(errno.ESTALE, "Stale file handle")]

    def stale(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(posix, call, stale)
    assert read(str(tmp_path / "node.conf"), "n1") == {"HookDeadline": "5"}
    failures += [OSError(errno.ESTALE, "Stale file handle") for _ in range(2)]
    with pytest.raises(ConfError, match="Stale file handle"):
        read(str(tmp_path / "node.conf"), "n1")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_configuration_that_others_can_write_is_refused(tmp_path, mode):
    with pytest.raises(ConfError, match="writable by nobody else"):
        read(write(tmp_path, "", mode), "n1")


def test_byte_order_mark_of_the_configuration_is_ignored(tmp_path):
    (tmp_path / "node.conf").write_bytes(b"\xef\xbb\xbfRunDir=/run/x\n")
    assert read(str(tmp_path / "node.conf"), "n1") == {"RunDir": "/run/x"}


def test_a_linked_or_huge_or_binary_configuration_is_refused(tmp_path):
    real = tmp_path / "real"
    real.write_text("")
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(ConfError, match="cannot be opened"):
        read(str(tmp_path / "link"), "n1")
    with pytest.raises(ConfError, match="larger"):
        read(write(tmp_path, "#" * 70000), "n1")
    (tmp_path / "node.conf").write_bytes(b"RunDir=/\xff\n")
    with pytest.raises(ConfError, match="UTF-8"):
        read(str(tmp_path / "node.conf"), "n1")


@given(st.binary(max_size=80))
def test_any_configuration_bytes_are_parsed_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("conf") / "node.conf"
    path.write_bytes(raw)
    path.chmod(0o644)
    with suppress(ConfError):
        read(str(path), "n1")
