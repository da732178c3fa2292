"""Determine what one user may see of other users' jobs, accounts and nodes, by PrivateData and privileges.

A user's text in a job (its comment, its name) is shown only to those who may see this user's private jobs, even
if jobs are not private.
"""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Pattern, Value

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable

    from slurm_migbatch.slurm.client import JobRow

#: values of PrivateData that hide something shown here
ALL_PRIVATE = frozenset({"jobs", "usage", "accounts", "nodes"})
#: a job with its user as written in messages, or a user by uid alone
_NAMED = Pattern(r"\b(jobs?) (\d{1,18})\b(?:('s)? of (?:uid )?[\w.@+=$\\-]+)?|\bof uid (\d{1,10})\b")


class Rights(Value):
    """Rights of one user.

    Attributes:
        everything: the user is root, SlurmUser, an operator or an administrator.
        coordinates: accounts that the user coordinates.
        private: values of PrivateData (jobs, usage, accounts, nodes).
    """

    uid: int
    everything: bool = False
    coordinates: frozenset[str] = frozenset()
    private: frozenset[str] = ALL_PRIVATE

    def in_full(self, uid: int | None, account: str | None) -> bool:
        """Return whether a user's text in a job may be shown: its comment, its name, and anything derived from them."""
        return self.everything or uid == self.uid or account in self.coordinates

    def job(self, uid: int | None, account: str | None) -> bool:
        """Return whether a job in the queue may be shown."""
        return self.in_full(uid, account) or "jobs" not in self.private

    def run(self, uid: int | None, account: str | None) -> bool:
        """Return whether a run in the record may be shown; both `jobs` and `usage` of PrivateData hide it."""
        return self.in_full(uid, account) or self.runs

    def account(self, uid: int | None, account: str | None) -> bool:
        """Return whether the name of a job's account may be shown."""
        return self.in_full(uid, account) or self.accounts

    @property
    def runs(self) -> bool:
        """Whether other users' runs in the record may be shown."""
        return self.everything or not self.private & {"jobs", "usage"}

    @property
    def accounts(self) -> bool:
        """Whether names of other users' accounts may be shown."""
        return self.everything or "accounts" not in self.private

    @property
    def nodes(self) -> bool:
        """Whether nodes may be shown."""
        return self.everything or "nodes" not in self.private

    def jobs(self, rows: Iterable[JobRow]) -> list[JobRow]:
        """Return the jobs that the user may see."""
        return [row for row in rows if self.job(row.uid, row.account)]

    def sentence(self, text: str, shown: Collection[int], name_of: Callable[[int], str] = str) -> str:
        """Return a sentence without jobs that are not among those `shown` to the user, and without their users.

        `name_of` returns a job as Slurm prints it (12_3), given its number, which sentences have.
        """
        hides = not self.everything and "jobs" in self.private

        def seen(found: re.Match[str]) -> str:
            if found[4]:
                return found[0] if not hides or int(found[4]) == self.uid else "of another user"
            if hides and int(found[2]) not in shown:
                return f"another user's {found[1]}{found[3] or ''}"
            end = found.end(2) - found.start()
            return f"{found[1]} {name_of(int(found[2]))}{found[0][end:]}"

        return _NAMED.made.sub(seen, text)
