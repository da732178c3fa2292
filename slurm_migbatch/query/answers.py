"""Answer every kind of query with its own functions, imported on first use."""

from __future__ import annotations

from slurm_migbatch.query.questions import (
    ExplainQuestion,
    LoansQuestion,
    NodesQuestion,
    PageQuestion,
    Question,
    RunsQuestion,
    ShowQuestion,
    TopQuestion,
    UsageQuestion,
    WasteQuestion,
    WhyQuestion,
)
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.values import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_migbatch.query.site import QuerySite
    from slurm_migbatch.slurm.rights import Rights


def answer(question: Question, rights: Rights, site: QuerySite) -> Reply:
    """Answer a user's query within his rights.

    Raises:
        Unanswerable: there is no answer; the message says why.
        StoreError, SlurmError: the record cannot be read, Slurm does not answer.
    """
    if isinstance(question, RunsQuestion):
        from slurm_migbatch.query import runs

        return runs.answer(question, rights, site)
    if isinstance(question, ShowQuestion):
        from slurm_migbatch.query import show

        return show.answer(question, rights, site)
    if isinstance(question, WhyQuestion):
        from slurm_migbatch.query import why

        return why.answer(question, rights, site)
    if isinstance(question, NodesQuestion):
        from slurm_migbatch.query import nodes

        return nodes.answer(question, rights, site)
    if isinstance(question, LoansQuestion):
        from slurm_migbatch.query import loans

        return loans.answer(question, rights, site)
    if isinstance(question, TopQuestion):
        from slurm_migbatch.query import top

        return top.answer(question, rights, site)
    if isinstance(question, UsageQuestion):
        from slurm_migbatch.query import usage

        return usage.answer(question, rights, site)
    if isinstance(question, WasteQuestion):
        from slurm_migbatch.query import waste

        return waste.answer(question, rights, site)
    if isinstance(question, PageQuestion):
        _require_plotly(site)
        from slurm_migbatch.query import pictures

        return pictures.answer(question, rights, site)
    assert isinstance(question, ExplainQuestion)
    from slurm_migbatch.query import explain

    return explain.answer(question, rights.uid, site)


def _require_plotly(site: QuerySite) -> None:
    from slurm_migbatch.report.pictures import require

    try:
        require()
    except ModuleNotFoundError as error:
        if not site.quiet:  # the command says what to install
            raise
        lacking = "the query service cannot draw: run pip install 'slurm-migbatch[report]' on its host"
        raise Unanswerable(lacking) from error
