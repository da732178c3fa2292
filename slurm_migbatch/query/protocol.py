"""Protocol between commands and the query service, besides `questions`: paths and the format of answers.

An answer is JSON: `{"version": 1, "code": 0, "out": "...", "err": ["..."]}`, or
`{"version": 1, "code": 1, "error": "..."}`.
"""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Value

if TYPE_CHECKING:
    from typing import Any

PATH = "/query/v1/ask"
#: the answer to GET of this path, which needs no credential: `migbatch doctor` asks who listens
GREETING = b'{"service":"migbatch query"}'
DEFAULT_PORT = 6831
VERSION = 1
#: larger answers are not read; the service's own bound ([query] answer_mb) is at most this
MAX_ANSWER = 257 << 20


class AnswerError(ValueError):
    """An invalid answer."""


class Answer(Value):
    """The output and exit code of a command; if there is no answer, only `error`."""

    code: int
    out: str = ""
    err: tuple[str, ...] = ()
    error: str = ""

    def write(self) -> bytes:
        """Return the answer in wire format."""
        import json

        fields: dict[str, Any] = {"version": VERSION, "code": self.code}
        fields |= {"error": self.error} if self.error else {"out": self.out, "err": self.err}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

    @classmethod
    def read(cls, body: bytes) -> Answer:
        """Parse the wire format. Raises AnswerError."""
        import json

        try:
            fields = json.loads(body)
            if fields["version"] != VERSION:
                raise AnswerError("command and service must be of the same release")
            code, error = fields["code"], fields.get("error", "")
            out, err = fields.get("out", ""), tuple(fields.get("err", ()))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise AnswerError("cannot parse the answer of the service") from None
        if not (type(code) is int and 0 <= code <= 255 and all(isinstance(text, str) for text in (out, error, *err))):
            raise AnswerError("cannot parse the answer of the service")
        return cls(code, out, err, error)
