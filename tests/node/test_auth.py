"""Credentials: by token, and by a real private munged."""

import os
import pwd
import secrets
import subprocess
import time

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.node import node as node_commands
from slurm_migbatch.node import auth
from slurm_migbatch.node.auth import AuthError, MungeSigner, PeerIdentity, TokenSigner, UsedCredentials, make_signer
from tests.support.munge import private_munged


def token_file(tmp_path, name="token", text=None, mode=0o600):
    path = tmp_path / name
    path.write_text(text or secrets.token_hex(32))
    path.chmod(mode)
    return str(path)


@pytest.fixture(scope="module")
def munge_socket(tmp_path_factory):
    with private_munged(tmp_path_factory.mktemp("munge")) as socket:
        yield socket


@pytest.fixture(params=["token", "munge"])
def signers(request, tmp_path):
    """The signers of a node and of its controller, with the same secret."""
    if request.param == "token":
        path = token_file(tmp_path)
        return TokenSigner(path), TokenSigner(path)
    socket = request.getfixturevalue("munge_socket")
    return MungeSigner(socket), MungeSigner(socket)


def test_credential_is_accepted_only_once(signers):
    node, controller = signers
    credential = node.sign(b"payload", "n1")
    identity = controller.verify(credential, b"payload", "n1")
    assert identity.uid == 0 and isinstance(identity, PeerIdentity)
    with pytest.raises(AuthError, match="used before"):
        controller.verify(credential, b"payload", "n1")


def test_credential_of_another_message_is_rejected(signers):
    node, controller = signers
    with pytest.raises(AuthError):
        controller.verify(node.sign(b"payload", "n1"), b"other payload", "n1")


@pytest.mark.parametrize("credential", ["", "MUNGE:AwQ:", "a:b:c:d", "x" * 5000, "\x00", "ü", "1:2:3", ":::"])
def test_malformed_credential_is_rejected(signers, credential):
    with pytest.raises(AuthError):
        signers[1].verify(credential, b"payload", "n1")


def test_munge_accepts_only_the_configured_uids(munge_socket):
    credential = MungeSigner(munge_socket).sign(b"x", "n1")
    with pytest.raises(AuthError, match="uid 0 is not"):
        MungeSigner(munge_socket, uids=[64001]).verify(credential, b"x", "n1")


@pytest.mark.parametrize("compression", ["zlib", "bzlib", "none"])
def test_compressed_munge_credential_is_not_decoded(munge_socket, monkeypatch, compression):
    """munged would decompress it for any user, and again each time it is sent."""
    command = ["munge", "--socket", munge_socket, "--zip", compression]
    made = subprocess.run(command, input=b"\0" * 2000, capture_output=True, check=True).stdout.decode().strip()
    signer = MungeSigner(munge_socket)
    if compression == "none":
        assert not auth._is_compressed(made.encode())
        return
    monkeypatch.setattr(signer._lib, "munge_decode", None)
    with pytest.raises(AuthError, match="the credential is compressed"):
        signer.verify(made, b"x", "n1")
    # munged skips blanks, so they must not hide the byte that says so
    for hidden in (made.replace(":", ": ", 1), f"{made[:8]} {made[8:]}", f" {made}"):
        with pytest.raises(AuthError, match="malformed"):
            signer.verify(hidden, b"x", "n1")


def test_munge_signer_raises_auth_error_without_munged(tmp_path):
    signer = MungeSigner(str(tmp_path / "nothing"))
    with pytest.raises(AuthError, match="munge"):
        signer.sign(b"x", "n1")


def test_missing_munge_library_error_suggests_auth_token():
    with pytest.raises(AuthError, match="Auth=token"):
        MungeSigner(library="libnothing.so.9")


def test_credential_signed_with_another_token_is_rejected(tmp_path):
    with pytest.raises(AuthError, match="does not match the token of n1"):
        TokenSigner(token_file(tmp_path, "a")).verify(
            TokenSigner(token_file(tmp_path, "b")).sign(b"x", "n1"), b"x", "n1"
        )


def test_expired_credential_is_rejected(tmp_path, monkeypatch):
    signer = TokenSigner(token_file(tmp_path))
    credential = signer.sign(b"x", "n1")
    later = time.time() + auth.TOKEN_LIFETIME_S + 2
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(AuthError, match="clocks"):
        signer.verify(credential, b"x", "n1")


def test_remembered_credentials_are_limited_for_each_node_separately(tmp_path, monkeypatch):
    """Anyone with a node's key can make any number of credentials, and each is remembered for ten minutes."""
    monkeypatch.setattr(auth, "MOST_CREDENTIALS", 20)
    path, used = token_file(tmp_path), UsedCredentials()
    node, controller = TokenSigner(path), TokenSigner(path, used=used)
    for _ in range(20):
        controller.verify(node.sign(b"x", "n1"), b"x", "n1")
    with pytest.raises(AuthError, match="n1 has made 20 credentials"):
        controller.verify(node.sign(b"x", "n1"), b"x", "n1")
    first = node.sign(b"x", "n2")
    controller.verify(first, b"x", "n2")
    later = time.time() + 2 * auth.TOKEN_LIFETIME_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    for _ in range(20):
        controller.verify(node.sign(b"x", "n1"), b"x", "n1")
    assert len(used) == 20 and dict(used._live) == {"n1": 20}
    with pytest.raises(AuthError, match="expired"):
        controller.verify(first, b"x", "n2")


def test_credential_with_a_malformed_nonce_or_time_is_rejected(tmp_path, monkeypatch):
    signer = TokenSigner(token_file(tmp_path))
    for nonce in ("a" * 65, "", "A", "ab c", "1_0"):
        monkeypatch.setattr("secrets.token_hex", lambda _, nonce=nonce: nonce)
        with pytest.raises(AuthError, match="malformed"):
            signer.verify(signer.sign(b"x", "n1"), b"x", "n1")
    monkeypatch.setattr(time, "time", lambda: 10.0**13)
    with pytest.raises(AuthError, match="malformed"):
        signer.verify(signer.sign(b"x", "n1"), b"x", "n1")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606])
def test_token_file_readable_by_others_is_rejected(tmp_path, mode):
    with pytest.raises(AuthError, match="chmod 600"):
        TokenSigner(token_file(tmp_path, mode=mode))


def test_short_missing_linked_or_foreign_token_file_is_rejected(tmp_path):
    with pytest.raises(AuthError, match="shorter"):
        TokenSigner(token_file(tmp_path, text="short"))
    with pytest.raises(AuthError, match="cannot be opened"):
        TokenSigner(str(tmp_path / "none"))
    os.symlink(token_file(tmp_path), tmp_path / "link")
    with pytest.raises(AuthError, match="cannot be opened"):
        TokenSigner(str(tmp_path / "link"))
    foreign = token_file(tmp_path, "foreign")
    os.chown(foreign, 64001, 64001)
    with pytest.raises(AuthError, match="chown root"):
        TokenSigner(foreign)


def test_root_prints_keys_of_the_secret_of_a_migbatchd_that_runs_as_slurm_user(tmp_path):
    path = token_file(tmp_path)
    line = TokenSigner(path).key_line("n1")
    os.chown(path, 64001, 64001)
    done = CliRunner().invoke(node_commands, ["key", "n1", "--secret", path], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, f"{line}\n")
    os.chmod(path, 0o640)
    with pytest.raises(AuthError, match="chmod 600"):
        CliRunner().invoke(node_commands, ["key", "n1", "--secret", path], catch_exceptions=False)


def test_keys_are_of_the_secret_that_migbatchd_is_configured_to_use(tmp_path, monkeypatch):
    """The advice of doctor, and node.conf, name the command without the secret's path."""
    path = token_file(tmp_path)
    config = tmp_path / "migbatch.toml"
    config.write_text(f'[node_api]\ntoken_file = "{path}"\n')
    for options, variable in ((["-c", str(config)], ""), ([], str(config))):
        monkeypatch.setenv("MIGBATCH_CONFIG", variable)
        done = CliRunner().invoke(node_commands, ["key", "n1", *options], catch_exceptions=False)
        assert (done.exit_code, done.output) == (0, f"{TokenSigner(path).key_line('n1')}\n")


def test_token_file_of_another_user_is_to_be_given_to_the_one_who_reads_it(open_tmp_path):
    """migbatchd may run as SlurmUser."""
    path = token_file(open_tmp_path, mode=0o644)
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        with pytest.raises(AuthError, match="chmod 600, chown nobody"):
            TokenSigner(path)
    finally:
        os.seteuid(0)


def test_make_signer_returns_the_configured_scheme(tmp_path):
    assert make_signer("token", token_file=token_file(tmp_path)).scheme == "token"
    assert make_signer("munge").scheme == "munge"
    with pytest.raises(AuthError):
        make_signer("password")


def test_credentials_are_forgotten_after_the_clock_is_set_back(tmp_path, monkeypatch):
    """A credential from before would otherwise keep all later ones remembered, up to the limit for one node."""
    path, now, used = token_file(tmp_path), [2e9], UsedCredentials()
    monkeypatch.setattr(time, "time", lambda: now[0])
    node, controller = TokenSigner(path), TokenSigner(path, used=used)
    ahead = node.sign(b"x", "n1")
    controller.verify(ahead, b"x", "n1")
    for _ in range(20):
        now[0] = now[0] - 86400 if now[0] == 2e9 else now[0] + 300
        controller.verify(node.sign(b"x", "n1"), b"x", "n1")
    assert len(used) <= 4 and used._live["n1"] == len(used)
    now[0] = 2e9 + 1
    with pytest.raises(AuthError, match="used before"):
        controller.verify(ahead, b"x", "n1")
