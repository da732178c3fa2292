"""Authenticate messages between nodes and the controller. Used by both sides.

There are two kinds. Munge (which every Slurm cluster has) states which uid made a credential and refuses to read one
twice; root of any node has its key and can make one in the name of any host. A token is a secret file, readable by root
only: the controller's, from which the key of each node is derived, or on a node that node's key alone (`node_key`).
In both, the node's name and a digest of the body are inside the credential, so it is valid for no other message and no
other node, and it can be checked before the body is read. Answers are signed too (`response_payload`), so that only
the controller can give a node a plan.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import heapq
import hmac
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, Protocol

SCHEME = "MigBatch"
SIGNATURE_HEADER = "X-Migbatch-Signature"
NODE_HEADER = "X-Migbatch-Node"
DIGEST_HEADER = "X-Migbatch-Digest"
MAX_CREDENTIAL = 4096
TOKEN_LIFETIME_S = 300.0
MIN_TOKEN_BYTES = 32
MOST_CREDENTIALS = 20_000
"""Credentials of one node that are remembered at a time: thirty a second, where a busy node makes two or three."""
KEY_WORD = "migbatch-node-key"
"""First word of a token file that holds one node's key: `migbatch-node-key NODE HEX`."""

_HEAD = re.compile(r"([0-9]{1,12}):([0-9a-f]{1,64}):(.+)")
_MUNGE_FORM = re.compile(rb"MUNGE:[A-Za-z0-9+/]+={0,2}:")
_MUNGE_OPT_ZIP_TYPE = 2
_MUNGE_OPT_ADDR4 = 5
_MUNGE_OPT_SOCKET = 8
_MUNGE_VERSION = 3
_MUNGE_ERRORS = {15: "expired", 16: "from the future", 17: "used before"}


class AuthError(RuntimeError):
    """A credential is invalid or could not be made; the message says why."""


class PeerIdentity(NamedTuple):
    """Maker of a credential; `host` is an address or name as far as the scheme provides one."""

    uid: int
    host: str


class Signer(Protocol):
    """Make and check credentials. Both calls are thread-safe."""

    @property
    def scheme(self) -> str:
        """`munge` or `token`."""

    def sign(self, payload: bytes, node: str) -> str:
        """Make a credential for this message, from or to `node`. Raises AuthError."""

    def verify(self, credential: str, payload: bytes, node: str) -> PeerIdentity:
        """Check that the credential is for this message, from or to `node`, and is new; return its maker.

        Raises AuthError.
        """


def digest_of(body: bytes) -> str:
    """Return the digest of a request's body, in the form of the request's header."""
    return hashlib.sha256(body).hexdigest()


def request_payload(method: str, path: str, node: str, digest: str) -> bytes:
    """Return the bytes that the credential of a request covers; `digest` is that of its body."""
    return f"{method} {path}\n{node}\n{digest}\n".encode()


def response_payload(credential: str, body: bytes) -> bytes:
    """Return the bytes that the signature of an answer covers: the request's credential and the answer's body."""
    digest = hashlib.sha256(credential.encode()).hexdigest()
    return f"RESPONSE {digest}\n".encode() + body


def headers(signer: Signer, method: str, path: str, node: str, body: bytes) -> tuple[dict[str, str], str]:
    """Return the headers with a request's node and credential, and the credential. Raises AuthError."""
    digest = digest_of(body)
    credential = signer.sign(request_payload(method, path, node, digest), node)
    request_headers = {
        "Authorization": f"{SCHEME} {signer.scheme} {credential}",
        NODE_HEADER: node,
        DIGEST_HEADER: digest,
    }
    return request_headers, credential


class MungeSigner:
    """Credentials by munge, through libmunge. `uids` are accepted makers; None: all."""

    scheme = "munge"

    def __init__(
        self, socket_path: str = "", uids: Collection[int] | None = (0,), library: str = "libmunge.so.2"
    ) -> None:
        """Load libmunge. Raises AuthError if it is missing."""
        self._socket = socket_path
        self._uids = None if uids is None else frozenset(uids)
        try:
            self._lib = lib = ctypes.CDLL(library)
            self._free = ctypes.CDLL(None).free
        except OSError as error:
            raise AuthError(f"{library} cannot be loaded ({error}): install munge, or set Auth=token") from None
        self._free.argtypes, self._free.restype = [ctypes.c_void_p], None
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        for name, arguments, result in (
            ("munge_ctx_create", [], pointer),
            ("munge_ctx_destroy", [pointer], None),
            ("munge_ctx_strerror", [pointer], ctypes.c_char_p),
            ("munge_encode", [ctypes.POINTER(pointer), pointer, ctypes.c_char_p, integer], integer),
            (
                "munge_decode",
                [ctypes.c_char_p, pointer, ctypes.POINTER(pointer), ctypes.POINTER(integer)]
                + [ctypes.POINTER(ctypes.c_uint32)] * 2,
                integer,
            ),
        ):
            function = getattr(lib, name)
            function.argtypes, function.restype = arguments, result

    def sign(self, payload: bytes, _node: str) -> str:
        """Make a munge credential that holds the message's SHA-256."""
        digest = hashlib.sha256(payload).hexdigest().encode()
        context = self._context()
        text = ctypes.c_void_p()
        try:
            self._check(context, self._lib.munge_ctx_set(context, _MUNGE_OPT_ZIP_TYPE, 0))  # see _is_compressed
            self._check(context, self._lib.munge_encode(ctypes.byref(text), context, digest, len(digest)))
            return ctypes.string_at(text.value or 0).decode("ascii")
        finally:
            self._free(text)
            self._lib.munge_ctx_destroy(context)

    def verify(self, credential: str, payload: bytes, _node: str) -> PeerIdentity:
        """Let munged check the credential; it refuses to decode the same one twice."""
        raw = _bounded(credential)
        if _MUNGE_FORM.fullmatch(raw) is None:  # munged skips blanks: they would hide the compression from us
            raise AuthError("the credential is malformed")
        if _is_compressed(raw):
            raise AuthError("munge: the credential is compressed")
        digest = hashlib.sha256(payload).hexdigest().encode()
        context = self._context()
        text, length = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        try:
            code = self._lib.munge_decode(raw, context, text, length, uid, gid)
            self._check(context, code)
            held = ctypes.string_at(text.value or 0, length.value) if text.value else b""
            host = self._host(context)
        finally:
            self._free(text)
            self._lib.munge_ctx_destroy(context)
        if not hmac.compare_digest(held, digest):
            raise AuthError("the credential is for another message")
        if self._uids is not None and uid.value not in self._uids:
            raise AuthError(f"uid {uid.value} is not authorized")
        return PeerIdentity(uid.value, host)

    def _context(self) -> ctypes.c_void_p:
        context = ctypes.c_void_p(self._lib.munge_ctx_create())
        if self._socket:
            # munge_ctx_set is variadic; without argtypes every argument is passed as it is given
            self._check(context, self._lib.munge_ctx_set(context, _MUNGE_OPT_SOCKET, self._socket.encode()))
        return context

    def _host(self, context: ctypes.c_void_p) -> str:
        address = ctypes.create_string_buffer(4)
        if self._lib.munge_ctx_get(context, _MUNGE_OPT_ADDR4, address):
            return ""
        return socket.inet_ntoa(address.raw)

    def _check(self, context: ctypes.c_void_p, code: int) -> None:
        if code:
            reason = (self._lib.munge_ctx_strerror(context) or b"").decode("utf-8", "replace")
            known = _MUNGE_ERRORS.get(code)
            raise AuthError(f"munge: the credential is {known}" if known else f"munge: {reason or f'error {code}'}")


def node_key(secret: bytes, node: str) -> bytes:
    """Derive the key of one node, from which neither the secret nor another node's key can be derived."""
    return hmac.new(secret, f"{KEY_WORD}\n{node}".encode(), hashlib.sha256).digest()


def read_private(path: str, owner: int | None = None) -> bytes:
    """Return the secret in a file of this user or of `owner`. Raises AuthError if others can read it or it is short."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise AuthError(f"the token file {path} cannot be opened: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), owner) or status.st_mode & 0o077:
            advice = f"chmod 600, chown {_own_name()}"
            raise AuthError(f"the token file {path} must be readable by its owner only: {advice}")
        text = file.read(65536).strip()
    if len(text) < MIN_TOKEN_BYTES:
        raise AuthError(f"the token in {path} is shorter than {MIN_TOKEN_BYTES} bytes: use `openssl rand -hex 32`")
    return text


def _own_name() -> str:
    import pwd  # hooks do not need it

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class UsedCredentials:
    """Remember the credentials that were accepted, for as long as they could be used again. Thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}  # by nonce
        self._due: list[tuple[float, str]] = []  # expiry and nonce; a heap, because a clock may be set back
        self._live: Counter[str] = Counter()  # number of remembered credentials by node
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._nodes)

    def use(self, nonce: str, node: str, now: float) -> None:
        """Remember a credential of `node` that is used at `now` (unix s). Raises AuthError if it was used already."""
        with self._lock:
            while self._due and self._due[0][0] <= now:
                maker = self._nodes.pop(heapq.heappop(self._due)[1])
                self._live[maker] -= 1
                if not self._live[maker]:
                    del self._live[maker]
            if nonce in self._nodes:
                raise AuthError("the credential was used before")
            if self._live[node] >= MOST_CREDENTIALS:
                minutes = 2 * TOKEN_LIFETIME_S / 60
                raise AuthError(f"{node} has made {self._live[node]} credentials within {minutes:.0f} minutes")
            self._nodes[nonce] = node
            heapq.heappush(self._due, (now + 2 * TOKEN_LIFETIME_S, nonce))
            self._live[node] += 1


class TokenSigner:
    """Credentials by a secret: HMAC-SHA256 with the node's key over time, a nonce, the node's name and the message.

    Holders of a node's key are accepted as its root, holders of the secret as root of any node. Clocks may differ by
    five minutes; within that time a credential is accepted once by each process.
    """

    scheme = "token"

    def __init__(self, path: str, owner: int | None = None, used: UsedCredentials | None = None) -> None:
        """Read the secret, or one node's key, in a file of this user or of `owner`.

        `used`: the credentials that an earlier signer of this process has accepted, to which those of this one are
        added. Raises AuthError if others can read the file or it holds neither.
        """
        text = read_private(path, owner)
        self._path = path
        self._own: tuple[str, bytes] | None = None
        self._secret = b""
        if text.startswith(KEY_WORD.encode()):
            self._own = _own_key(path, text)
        else:
            self._secret = text
        self._used = UsedCredentials() if used is None else used

    def key_line(self, node: str) -> str:
        """Return the line of a node's token file that replaces the secret. Raises AuthError."""
        return f"{KEY_WORD} {node} {self._key(node).hex()}"

    def sign(self, payload: bytes, node: str) -> str:
        """Make a credential `<seconds>:<nonce>:<node>:<hmac>`."""
        head = f"{int(time.time())}:{secrets.token_hex(12)}:{node}"
        return f"{head}:{self._mac(head, payload, node)}"

    def verify(self, credential: str, payload: bytes, node: str) -> PeerIdentity:
        """Check the HMAC first, then the time, then whether the credential was used before."""
        head, _, mac = _bounded(credential).decode("ascii").rpartition(":")
        fields = _HEAD.fullmatch(head)
        if fields is None:
            raise AuthError("the credential is malformed")
        if fields[3] != node or not hmac.compare_digest(mac, self._mac(head, payload, node)):
            raise AuthError(f"the credential does not match the token of {node} and this message")
        now = time.time()
        if abs(now - int(fields[1])) > TOKEN_LIFETIME_S:
            raise AuthError("the credential has expired: check that the clocks of node and controller agree")
        self._used.use(fields[2], node, now)
        return PeerIdentity(0, node)

    def _key(self, node: str) -> bytes:
        if self._own is None:
            return node_key(self._secret, node)
        if self._own[0] != node:
            raise AuthError(f"{self._path} has the key of node {self._own[0]}, not of {node}")
        return self._own[1]

    def _mac(self, head: str, payload: bytes, node: str) -> str:
        return hmac.new(self._key(node), head.encode("ascii") + b"\n" + payload, hashlib.sha256).hexdigest()


def _own_key(path: str, text: bytes) -> tuple[str, bytes]:
    try:
        _, node, key = text.decode("ascii").split()
        return node, bytes.fromhex(key)
    except ValueError:
        raise AuthError(f"{path} has no node key: create it with `migbatch node key NODE`") from None


def _bounded(credential: str) -> bytes:
    if len(credential) > MAX_CREDENTIAL or not credential.isascii() or not credential.isprintable():
        raise AuthError("the credential is malformed")
    return credential.encode("ascii")


def _is_compressed(credential: bytes) -> bool:
    """Return whether a munge credential of the usual version has a compressed payload.

    munged decompresses it before it knows whether the credential is valid or was used before, and a thousand bytes may
    become a million.
    """
    try:
        version, _cipher, _mac, compression = base64.b64decode(credential.partition(b":")[2][:8])[:4]
    except ValueError:  # munged refuses it
        return False
    return version == _MUNGE_VERSION and compression != 0


def make_signer(
    kind: str,
    *,
    munge_socket: str = "",
    token_file: str = "",
    uids: Collection[int] = (0,),
    owner: int | None = None,
    used: UsedCredentials | None = None,
) -> Signer:
    """Make the signer that a configuration names (`munge` or `token`); `owner`, `used`: see TokenSigner.

    Raises AuthError.
    """
    if kind == "munge":
        return MungeSigner(munge_socket, uids)
    if kind == "token":
        return TokenSigner(token_file, owner, used)
    raise AuthError(f"Auth={kind}: must be munge or token")
