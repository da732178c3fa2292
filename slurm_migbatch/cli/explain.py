"""`migbatch explain`: what a request would become and why, without submitting it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import Failure, config_option, default_partition, print_pairs, print_table
from slurm_migbatch.config import Config
from slurm_migbatch.predict.candidate import Candidate, Interval
from slurm_migbatch.submit.client import ServiceUnavailable, ask
from slurm_migbatch.submit.decision import Decision
from slurm_migbatch.submit.request import OPTIONS, Accept, Answer, JobRequest, Pass, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.workload.catalog import CatalogError, SiteCatalog, load

SCHEMA = 1
EXIT_REFUSED = 3
_TOKENS = (("TTFT_MS", "ttft_s", 1e3), ("TPOT_MS", "tpot_s", 1e3), ("TOKENS/S", "tokens_per_s", 1.0))
"""Columns of language models: title, name in `Figures.tokens`, scale."""


@click.command()
@config_option
@click.option("--gres", metavar="LIST", help="As for sbatch, for example mig:auto, mig:2g.20gb:1 or gpu:1.")
@click.option("-G", "--gpus", metavar="N", help="As for sbatch.")
@click.option("--gpus-per-node", metavar="N", help="As for sbatch.")
@click.option("--gpus-per-task", metavar="N", help="As for sbatch.")
@click.option("--gpus-per-socket", metavar="N", help="As for sbatch.")
@click.option("--comment", metavar="TEXT", help="Hints, for example 'migbatch: model=bert-large batch=32 slo=200ms'.")
@click.option("--extra", metavar="TEXT", help="Hints, where the site allows them here.")
@click.option(
    "-p", "--partition", metavar="NAME", help="Partition [default: the only one with MIG, else Slurm's default]."
)
@click.option("-N", "--nodes", type=click.IntRange(1, 100000), help="Nodes of the job.")
@click.option("-n", "--ntasks", type=click.IntRange(1, 1000000), help="Tasks of the job.")
@click.option("--ntasks-per-node", type=click.IntRange(1, 100000), help="Tasks on each node.")
@click.option(
    "--catalog", "catalog_file", metavar="FILE", help="Catalog to use [default: the one that migbatchd keeps]."
)
@click.option("--service", "service_socket", metavar="SOCKET", help="Ask the service there too, and compare.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def explain(config: Config, catalog_file: str | None, service_socket: str | None, as_json: bool, **options: Any) -> int:
    """Show what the submit filter would make of a request, with every candidate and its predicted figures.

    Nothing is submitted and nothing recorded. Exit code 0: it would be accepted; 3: refused.
    """
    catalog = _catalog(Path(catalog_file or config.submit.catalog))
    request = _request(options, catalog, config)
    answer = _answer(request, catalog, config)
    service_answer = None if service_socket is None else _of_service(Path(service_socket), request)
    if as_json:
        click.echo(json.dumps(_object(request, answer, service_answer), indent=1))
    else:
        _print(request, answer, service_answer)
    return EXIT_REFUSED if isinstance(answer, Refuse) else 0


def _catalog(path: Path) -> SiteCatalog:
    try:
        return load(path)
    except FileNotFoundError:
        raise Failure(
            f"there is no catalog at {path}; name one with --catalog, or run this where migbatchd has run once"
        ) from None
    except CatalogError as error:
        raise Failure(f"{path}: {error}") from None


def _request(options: dict[str, Any], catalog: SiteCatalog, config: Config) -> JobRequest:
    per_node = [part for part in (options["gres"], _gpu(options["gpus_per_node"])) if part]
    partition = options["partition"]
    if partition is None:
        partition = next(iter(catalog.partitions)) if len(catalog.partitions) == 1 else default_partition(config)
    if not partition:
        raise click.UsageError(f"which partition? Name one with --partition: {catalog.names}")
    nodes = options["nodes"]
    return JobRequest(
        uid=_asking_uid(),
        partition=_bytes(partition),
        tres_per_node=_bytes(",".join(per_node)) or None,
        tres_per_job=_gpu(options["gpus"]),
        tres_per_task=_gpu(options["gpus_per_task"]),
        tres_per_socket=_gpu(options["gpus_per_socket"]),
        comment=None if options["comment"] is None else _bytes(options["comment"]),
        extra=None if options["extra"] is None else _bytes(options["extra"]),
        min_nodes=nodes,
        max_nodes=nodes,
        num_tasks=options["ntasks"],
        ntasks_per_node=options["ntasks_per_node"],
        batch=1,
    )


def _asking_uid() -> int:
    """Return the caller's uid, or an ordinary user's where the caller is root, whose jobs the filter leaves alone."""
    return os.getuid() or 65534


def _gpu(value: str | None) -> str | None:
    return None if value is None else _bytes(f"gpu:{value}")


def _bytes(text: str) -> str:
    """Return an argument as the filter sees it, one character for each byte."""
    return os.fsencode(text).decode("latin-1")


def _answer(request: JobRequest, catalog: SiteCatalog, config: Config) -> Answer:
    from slurm_migbatch.daemon.facts import chooser_of, policy_of

    policy = replace(policy_of(config), trusted_uids=frozenset())
    return rewrite(request, catalog, chooser_of(config), policy)


def _of_service(path: Path, request: JobRequest) -> Answer:
    try:
        return ask(path, request)
    except ServiceUnavailable as error:
        raise Failure(str(error)) from None


def _object(request: JobRequest, answer: Answer, service_answer: Answer | None) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": SCHEMA, "asked": _asked(request), "partition": request.partition}
    found |= _verdict(answer)
    if isinstance(answer, Accept) and answer.decision is not None:
        row = answer.decision.to_dict()
        found["decision"] = {
            key: row[key] for key in ("hints", "bucket", "predictor", "candidates", "granted", "reason", "advice")
        }
    if service_answer is not None:
        found["service"] = _verdict(service_answer)
    return found


def _verdict(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Refuse):
        return {"verdict": "refuse", "message": answer.sentence, "code": answer.code, "changes": {}}
    if isinstance(answer, Pass):
        return {"verdict": "pass", "message": answer.message, "changes": {}}
    return {"verdict": "accept", "message": answer.message, "changes": {k: _text(v) for k, v in answer.changes.items()}}


def _asked(request: JobRequest) -> dict[str, str]:
    names = {**OPTIONS, "comment": "--comment", "extra": "--extra"}
    given = {name: _text(text) for name in names if (text := getattr(request, name))}
    return {names[name]: text if name == "tres_per_node" else text.removeprefix("gpu:") for name, text in given.items()}


def _text(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "replace")


def _print(request: JobRequest, answer: Answer, service_answer: Answer | None) -> None:
    pairs = [("asked", " ".join(f"{option}={text!r}" for option, text in _asked(request).items()) or "nothing")]
    pairs.append(("partition", request.partition or ""))
    if isinstance(answer, Refuse):
        pairs.append(("refused", answer.sentence))
    elif isinstance(answer, Pass):
        pairs.append(("passes", answer.message or "unchanged: the job requests no slice here"))
    elif answer.decision is not None:
        pairs += _decision(answer.decision)
        pairs += [(f"sets {name}", _text(value) or "(cleared)") for name, value in answer.changes.items()]
        if answer.message:
            pairs.append(("told", answer.message))
    if service_answer is not None:
        verdict = _verdict(service_answer)
        pairs.append(
            ("service", f"{verdict['verdict']}: {verdict['changes'].get('tres_per_node', verdict['message'])}")
        )
    print_pairs(pairs)
    if isinstance(answer, Accept) and answer.decision is not None and answer.decision.candidates:
        click.echo()
        _candidates(answer.decision.candidates)


def _decision(decision: Decision) -> list[tuple[str, str]]:
    hints = " ".join(f"{key}={value}" for key, value in decision.hints.to_dict().items())
    return [
        ("hints", hints or "none"),
        ("bucket", decision.bucket or "none: no known model is named"),
        ("advice", _advice(decision)),
        ("predictor", decision.predictor),
        ("granted", f"{decision.granted} ({decision.reason.replace('_', ' ')})"),
    ]


def _advice(decision: Decision) -> str:
    advice = decision.advice
    return "none" if advice is None else f"MIGBATCH_BATCH={advice.batch} MIGBATCH_COPIES={advice.copies}"


def _candidates(candidates: tuple[Candidate, ...]) -> None:
    def shown(interval: Interval | None, scale: float = 1.0) -> str:
        if interval is None:
            return "-"
        return f"{interval.mid * scale:.3g} ({interval.low * scale:.3g}-{interval.high * scale:.3g})"

    rows = []
    speeds = _TOKENS if any(each.figures and each.figures.tokens for each in candidates) else ()
    for candidate in candidates:
        known = candidate.figures
        tokens = {} if known is None else known.tokens
        timed = [(tokens.get(name), scale) for _, name, scale in speeds] or [
            (known.latency_s if known else None, 1e3),
            (known.throughput_per_s if known else None, 1.0),
        ]
        rows.append(
            (
                candidate.profile.name,
                str(candidate.offer.compute_slices),
                f"{candidate.offer.memory_mib / 1024:.3g}",
                shown(known.memory_mib if known else None, 1 / 1024),
                *(shown(interval, scale) for interval, scale in timed),
                "yes" if candidate.ok else "no",
                candidate.why,
            )
        )
    columns = [title for title, _, _ in speeds] or ["BATCH_MS", "ITEMS/S"]
    print_table(("PROFILE", "SLICES", "GIB", "NEEDS_GIB", *columns, "OK", "WHY"), rows)
