"""Look up users as slurm.conf specifies them: by name, or by number."""

from __future__ import annotations


def uid_of(user: str) -> tuple[int, ...]:
    """Return a tuple of the uid of a user by name or number; empty for a name that this host does not know."""
    import pwd

    try:
        return (pwd.getpwnam(user).pw_uid,)
    except KeyError:
        return (int(user),) if user.isascii() and user.isdigit() else ()


def name_of(user: str) -> str:
    """Return the name of a user by name or number; unchanged if this host does not know it."""
    import pwd

    try:
        return next((pwd.getpwuid(uid).pw_name for uid in uid_of(user)), user)
    except (KeyError, OverflowError):
        return user
