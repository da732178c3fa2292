"""Answer every kind of query with its own functions, imported on first use."""

from __future__ import annotations

from importlib import import_module

from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_migbatch.query.questions import Question
    from slurm_migbatch.query.site import QuerySite
    from slurm_migbatch.slurm.rights import Rights


def answer(question: Question, rights: Rights, site: QuerySite) -> Reply:
    """Answer a query within the rights of its user.

    Raises:
        Unanswerable: there is no answer; the message says why.
        StoreError, SlurmError: the record cannot be read, Slurm does not answer.
    """
    module = question.kind  # named like the kind of query
    if question.kind == "page":
        _require_plotly(site)
        module = "pictures"
    reply: Reply = import_module(f"slurm_migbatch.query.{module}").answer(question, rights, site)
    return reply


def _require_plotly(site: QuerySite) -> None:
    from slurm_migbatch.report.pictures import require

    try:
        require()
    except ModuleNotFoundError as error:
        if not site.quiet:  # the command says what to install
            raise
        message = "the query service cannot draw: run pip install 'slurm-migbatch[report]' on its host"
        raise Unanswerable(message) from error
