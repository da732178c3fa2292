"""Increasing numbers for runs that have become lessons, so that a reader can continue after the last one it has seen.

The order of `Run.id` would not do (a run that began first may end last), nor that of `ended` (a disconnected node
reports ends from long ago).
"""

from __future__ import annotations

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.orm import Session

from slurm_migbatch.store.models import Run


def number(session: Session) -> None:
    """Number the runs that became lessons in the transaction; its last action.

    `models._settle` marks them by their previous number n, as -1 - n (0 for none), so that it is not given again.
    """
    session.flush()
    fresh = session.execute(select(Run.id, Run.lesson).where(Run.lesson < 0).order_by(Run.ended, Run.id)).all()
    if fresh:
        last = max(session.scalar(select(func.max(Run.lesson))) or 0, *(-1 - row.lesson for row in fresh))
        statement = update(Run).where(Run.__table__.c.id == bindparam("of")).values(lesson=bindparam("to"))
        session.connection().execute(statement, [{"of": row.id, "to": last + i} for i, row in enumerate(fresh, 1)])
