"""`migbatch explain`: how a request would be rewritten and why, without submitting it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_migbatch.config import Config
from slurm_migbatch.predict.candidate import Candidate, Interval
from slurm_migbatch.query.questions import ExplainQuestion
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.lines import pair_lines, table_lines
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.submit.client import ServiceUnavailable, ask
from slurm_migbatch.submit.decision import SubmitDecision, as_utf8
from slurm_migbatch.submit.request import OPTIONS, Accept, Answer, JobRequest, Pass, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.values.figures import digits, gib
from slurm_migbatch.workload.catalog import CatalogError, SiteCatalog, load

SCHEMA = 1
EXIT_REFUSED = 3
_NOBODY = 65534
_TOKENS = (("TTFT_MS", "ttft_s", 1e3), ("TPOT_MS", "tpot_s", 1e3), ("TOKENS/S", "tokens_per_s", 1.0))
"""Columns of language models: title, name in `Figures.tokens`, scale."""


def answer(question: ExplainQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the submit filter's result for the request of that user."""
    catalog = _catalog(site)
    remarks: tuple[str, ...] = ()
    partition = question.partition
    if partition is None:
        partition, remarks = _partition(catalog, site)
    request = _request(question, rights.uid, partition)
    decided = _answer(request, catalog, site.config)
    service_answer = _of_service(Path(site.submit_socket), request) if site.submit_socket else None
    if question.as_json:
        lines = [json.dumps(_object(request, decided, service_answer), indent=1)]
    else:
        lines = list(_lines(request, decided, service_answer))
    return Reply(lines, remarks, EXIT_REFUSED if isinstance(decided, Refuse) else 0)


def _catalog(site: QuerySite) -> SiteCatalog:
    path = Path(site.catalog or site.config.submit.catalog)
    try:
        return load(path)
    except FileNotFoundError:
        if site.quiet:
            raise Unanswerable("the GPUs of this site are unknown: migbatchd has not seen its nodes yet") from None
        raise Unanswerable(
            f"no catalog at {path}; use --catalog, or run this on a host where migbatchd has run"
        ) from None
    except (OSError, CatalogError) as error:
        sentence = "cannot read the catalog of this site" if site.quiet else f"{path}: {error}"
        raise Unanswerable(sentence, detail=f"{path}: {error}") from None


def _partition(catalog: SiteCatalog, site: QuerySite) -> tuple[str, tuple[str, ...]]:
    """Return the partition of a request that has none: the only one with MIG, else Slurm's default."""
    if len(catalog.partitions) == 1:
        return next(iter(catalog.partitions)), ()
    remarks: tuple[str, ...] = ()
    name = ""
    try:
        name = site.slurm().default_partition()
    except SlurmError as error:
        remarks = (f"migbatch: the default partition is not known, Slurm does not answer{site.detail(error)}",)
    if not name:
        raise Unanswerable(f"specify a partition with --partition: {catalog.names}", 2)
    return name, remarks


def _request(question: ExplainQuestion, uid: int, partition: str) -> JobRequest:
    per_node = [part for part in (_gpu(question.gpus_per_node), question.gres) if part]  # as Slurm
    return JobRequest(
        uid=uid or _NOBODY,  # the filter does not change root's own jobs
        partition=partition,
        tres_per_node=",".join(per_node) or None,
        tres_per_job=_gpu(question.gpus),
        tres_per_task=_gpu(question.gpus_per_task),
        tres_per_socket=_gpu(question.gpus_per_socket),
        comment=question.comment,
        extra=question.extra,
        min_nodes=question.nodes,
        max_nodes=question.nodes,
        num_tasks=question.ntasks,
        ntasks_per_node=question.ntasks_per_node,
        batch=1,
    )


def _gpu(value: str | None) -> str | None:
    return None if value is None else f"gpu:{value.replace(',', ',gpu:')}"


def _answer(request: JobRequest, catalog: SiteCatalog, config: Config) -> Answer:
    from slurm_migbatch.daemon.facts import chooser_of, policy_of

    policy = replace(policy_of(config), trusted_uids=frozenset())
    return rewrite(request, catalog, chooser_of(config), policy)


def _of_service(path: Path, request: JobRequest) -> Answer:
    try:
        return ask(path, request)
    except ServiceUnavailable as error:
        raise Unanswerable(str(error)) from None


def _object(request: JobRequest, answer: Answer, service_answer: Answer | None) -> dict[str, Any]:
    document: dict[str, Any] = {"schema": SCHEMA, "asked": _options_of(request), "partition": request.partition}
    document |= _verdict(answer)
    if isinstance(answer, Accept) and answer.decision is not None:
        row = answer.decision.to_dict()
        document["decision"] = {
            key: row[key] for key in ("hints", "bucket", "predictor", "candidates", "granted", "reason", "advice")
        }
    if service_answer is not None:
        document["service"] = _verdict(service_answer)
    return document


def _verdict(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Refuse):
        return {"verdict": "refuse", "message": answer.sentence, "code": answer.code, "changes": {}}
    if isinstance(answer, Pass):
        return {"verdict": "pass", "message": answer.message, "changes": {}}
    return {
        "verdict": "accept",
        "message": answer.message,
        "changes": {k: as_utf8(v) for k, v in answer.changes.items()},
    }


def _options_of(request: JobRequest) -> dict[str, str]:
    names = {**OPTIONS, "comment": "--comment", "extra": "--extra"}
    options = {name: as_utf8(text) for name in names if (text := getattr(request, name))}
    return {
        names[name]: text if name == "tres_per_node" else text.removeprefix("gpu:").replace(",gpu:", ",")
        for name, text in options.items()
    }


def _lines(request: JobRequest, answer: Answer, service_answer: Answer | None) -> Iterator[str]:
    pairs = [
        ("requested", " ".join(f"{option}={text!r}" for option, text in _options_of(request).items()) or "nothing")
    ]
    pairs.append(("partition", request.partition or ""))
    if isinstance(answer, Refuse):
        pairs.append(("refused", answer.sentence))
    elif isinstance(answer, Pass):
        pairs.append(("passed", answer.message or "unchanged: the job requests no slice here"))
    elif answer.decision is not None:
        pairs += _decision(answer.decision)
        pairs += [(f"sets {name}", as_utf8(value) or "(cleared)") for name, value in answer.changes.items()]
        if answer.message:
            pairs.append(("message", answer.message))
    if service_answer is not None:
        verdict = _verdict(service_answer)
        pairs.append(
            ("service", f"{verdict['verdict']}: {verdict['changes'].get('tres_per_node', verdict['message'])}")
        )
    yield from pair_lines(pairs)
    if isinstance(answer, Accept) and answer.decision is not None and answer.decision.candidates:
        yield ""
        yield from _candidates(answer.decision.candidates)


def _decision(decision: SubmitDecision) -> list[tuple[str, str]]:
    hints = " ".join(f"{key}={value}" for key, value in decision.hints.to_dict().items())
    return [
        ("hints", hints or "none"),
        ("bucket", decision.bucket or "none: no known model"),
        ("advice", _advice(decision)),
        ("predictor", decision.predictor),
        ("granted", f"{decision.granted} ({decision.reason.replace('_', ' ')})"),
    ]


def _advice(decision: SubmitDecision) -> str:
    advice = decision.advice
    return "none" if advice is None else f"MIGBATCH_BATCH={advice.batch} MIGBATCH_COPIES={advice.copies}"


def _candidates(candidates: tuple[Candidate, ...]) -> Iterator[str]:
    """Yield the table of the profiles that were considered, with their predictions."""

    def shown(interval: Interval | None, scale: float = 1.0) -> str:
        if interval is None:
            return "-"
        return f"{digits(interval.mid * scale)} ({digits(interval.low * scale)}-{digits(interval.high * scale)})"

    rows = []
    token_columns = _TOKENS if any(candidate.figures and candidate.figures.tokens for candidate in candidates) else ()
    for candidate in candidates:
        figures = candidate.figures
        tokens = {} if figures is None else figures.tokens
        timed = [(tokens.get(name), scale) for _, name, scale in token_columns] or [
            (figures.latency_s if figures else None, 1e3),
            (figures.throughput_per_s if figures else None, 1.0),
        ]
        rows.append(
            (
                candidate.profile.name,
                str(candidate.offer.compute_slices),
                gib(candidate.offer.memory_mib),
                shown(figures.memory_mib if figures else None, 1 / 1024),
                *(shown(interval, scale) for interval, scale in timed),
                "yes" if candidate.ok else "no",
                candidate.why,
            )
        )
    columns = [title for title, _, _ in token_columns] or ["BATCH_MS", "ITEMS/S"]
    yield from table_lines(("PROFILE", "SLICES", "GIB", "NEEDS_GIB", *columns, "OK", "WHY"), rows)
