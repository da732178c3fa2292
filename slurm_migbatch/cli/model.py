"""`migbatch model`: show the learned predictor, refit it, roll it back."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import HELP, Group, config_option, open_record, print_pairs, print_table, steps
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.config import Config
from slurm_migbatch.values.figures import plural

if TYPE_CHECKING:
    from slurm_migbatch.daemon.refit import TrainingData
    from slurm_migbatch.predict.llm.architecture import Architecture
    from slurm_migbatch.predict.statefile import Index, ModelDirectory, Saved

_DRIFTS = 1.5
"""Ratio of measured to predicted, in either direction, from which a model is marked."""
_NAME = re.compile(r"[A-Za-z0-9._/:+-]+")
"""A name that `model=` can have."""
json_option = click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")


@click.group(cls=Group, context_settings=HELP)
def model() -> None:
    """Show and manage the predictor learned from finished runs and imported measurements.

    migbatchd learns by itself ([learning] of migbatch.toml) and applies changes made here within seconds.
    """


@model.command("list")
@config_option
@json_option
def list_(config: Config, as_json: bool) -> None:
    """List the kept versions and the last refits."""
    directory = _directory(config)
    index = directory.index()
    versions = [_described(directory, index, version) for version in reversed(directory.versions())]
    if as_json:
        click.echo(json.dumps({"current": index.current, "versions": versions, "refits": list(index.tries)}))
        return
    if not versions:
        click.echo("nothing learned yet: predictions use physics and data sheets")
    else:
        _print_versions(versions, index)
    if index.tries:
        click.echo("\nlast refits")
        print_table(
            ("WHEN", "OUTCOME", "VERSION", "BECAUSE OF", "WHY"),
            [_attempt_row(attempt) for attempt in reversed(index.tries)],
        )


@model.command()
@click.argument("version", type=click.IntRange(min=1), required=False)
@config_option
@json_option
def show(config: Config, version: int | None, as_json: bool) -> None:
    """Show one version [default: the current one]: its training data, accuracy since, and drifting models.

    RATIO is the median of measured over predicted (batch time; memory); THEN on the runs that the version learned from,
    NOW on those since. KEPT is the share of runs since that met the predicted limit.
    """
    from slurm_migbatch.daemon.facts import known_models
    from slurm_migbatch.daemon.refit import due, gather, watch

    directory = _directory(config)
    index = directory.index()
    current = directory.current()
    saved = current.saved if version is None else directory.load(version)
    facts = known_models(config)
    with open_record(config) as store:
        material = gather(store, facts, config.learning.runs, saved)
    troubles = [*current.troubles, *_impossible(material)]
    found = {
        "version": saved.learned.version,
        "current": index.current,
        "troubles": troubles,
        "created": saved.learned.created,
        "rows": saved.learned.rows,
        "models": len({fitted.model for fitted in saved.learned.fitted.values()}),
        "report": dict(saved.report),
        "watch": watch(saved, material, facts, config.learning.confidence),
        "waiting": {
            "runs": sum(observation.number > index.seen.get("lesson", 0) for observation in material.observations),
            "due": due(index, material, facts, config.learning.min_new),
        },
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    for trouble in troubles:
        click.echo(f"warning: {trouble}", err=True)
    _print_model(found, config)


def _impossible(material: TrainingData) -> list[str]:
    if not material.impossible:
        return []
    return [
        f"impossible measured points in the record, ignored: {len(material.impossible)}, "
        f"first: {material.impossible[0]}"
    ]


@model.command()
@config_option
@json_option
def refit(config: Config, as_json: bool) -> int:
    """Learn now from the whole record, regardless of the number of new runs (as root or SlurmUser).

    The same check decides as for migbatchd. Exit code 3: no new version was accepted; the output says why (no data, or
    a larger error than that of the current version).
    """
    from slurm_migbatch.daemon.refit import run

    _may_write(config)
    with steps() as progress:
        result = run(config, force="asked for", progress=progress)["refit"]
    if as_json:
        click.echo(json.dumps(result))
    elif result["outcome"] == "taken":
        click.echo(f"version {result['version']} is current: {_check(result)}")
    else:
        click.echo(f"no new version: {result['why']}")
    return 0 if result["outcome"] == "taken" else 3


@model.command()
@click.argument("version", type=click.IntRange(min=0), required=False)
@config_option
def rollback(config: Config, version: int | None) -> None:
    """Go back to an earlier version [default: the last one before the current], or 0 for physics alone.

    The current version is rejected: it is not used again unless it is given here. migbatchd waits for new runs before
    it learns again; [learning] enabled = false disables learning.
    """
    from slurm_migbatch.daemon.facts import known_models
    from slurm_migbatch.daemon.refit import seen_of
    from slurm_migbatch.store.recurring import learnable

    _may_write(config)
    with open_record(config) as store:
        seen = seen_of(store.read(learnable), known_models(config))
    before, now = _directory(config).roll_back(version, time.time(), seen)
    click.echo(f"predictions use {_named(now)} instead of {_named(before)}")


@model.command()
@click.argument("what", metavar="DIR|CONFIG|NAME")
@click.option("--hints", "hints_only", is_flag=True, help="Only the hints, on one line.")
@json_option
def describe(what: str, hints_only: bool, as_json: bool) -> None:
    """Print the hints of a language model: a directory with a config.json, such a file, one in GGUF, or a public name;
    of an adapter's directory those of its base, of a pipeline of diffusers those of the public one.

    Only config.json is read (or params.json, and hf_quant_config.json), and of the weight files beside it the sizes and
    the headers, which say how many parameters they hold; nothing of the model is loaded or run.
    """
    from pathlib import Path

    from slurm_migbatch.predict.llm.modeldir import describe as read
    from slurm_migbatch.predict.llm.modeldir import stands_for

    what = stands_for(Path(what)) or what
    if Path(what).exists():
        found = read(Path(what))
        architecture, hints, name, counted = found.architecture, found.hints, found.name, found.counted
    else:
        architecture, hints, name = _public(what)
        counted = "name"
    if hints_only:
        click.echo(hints)
        return
    description = {
        "model": name,
        "parameters": architecture.parameters,
        "counted_from": counted,
        "weights_gib_at_16_bits": round(architecture.parameters / 2**29, 2),
        "kv_cache_bytes_a_token": 2 * (architecture.cache_values(2) - architecture.cache_values(1)),
        "context": architecture.context,
        "hints": hints,
    }
    if as_json:
        click.echo(json.dumps(description))
        return
    print_pairs([(key.replace("_", " "), str(value)) for key, value in description.items()])


def _public(name: str) -> tuple[Architecture, str, str]:
    from slurm_migbatch.predict.llm import names
    from slurm_migbatch.predict.llm.precision import UNQUANTIZED

    # an adapter names its base: with a blank in it that would add hints to the jobs of those who use the adapter
    found = names.resolve(name.lower()) if _NAME.fullmatch(name) else None
    if found is None:
        near = names.suggestion(name.lower())
        meant = f"; did you mean {near}?" if near else ""
        raise Failure(f"{name} is neither a directory nor a known public model{meant}")
    how = f" params={round(found.architecture.parameters / 1e6)}m" if found.how == "size" else ""
    kept = "" if found.precision.name in UNQUANTIZED else f" quantization={found.precision.name}"
    again, called = names.resolve(found.name), found.name
    # the canonical name does not say the data type, the context or the parts beside the model that the given one says
    if again and (again.architecture != found.architecture or (again.precision != found.precision and not kept)):
        called = name.lower()
    return found.architecture, f"model={called}{how}{kept}", found.name


def _directory(config: Config) -> ModelDirectory:
    from slurm_migbatch.daemon.facts import models_of

    return models_of(config)


def _may_write(config: Config) -> None:
    """Refuse early, before a file of another user is written that migbatchd would reject."""
    from pathlib import Path

    path = Path(config.learning.models)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK) or (path.exists() and os.geteuid() not in (0, path.stat().st_uid)):
        raise Failure(f"{path} is not writable by this user; run this as root or SlurmUser")


def _described(directory: ModelDirectory, index: Index, version: int) -> dict[str, Any]:
    from slurm_migbatch.predict.state import StateError

    found: dict[str, Any] = {"version": version, "status": _status(index, version)}
    try:
        saved = directory.load(version)
    except StateError as error:
        return {**found, "status": "unusable", "why": str(error)}
    return {**found, "created": saved.learned.created, "rows": saved.learned.rows, **_counts(saved)}


def _counts(saved: Saved) -> dict[str, Any]:
    report = saved.report
    return {
        "runs": report.get("runs"),
        "models": len({fit.model for fit in saved.learned.fitted.values()}),
        "check": report.get("check"),
        "seconds": report.get("seconds"),
    }


def _status(index: Index, version: int) -> str:
    if version == index.current:
        return "current"
    return "rejected" if version in index.rejected else ""


def _print_versions(versions: list[dict[str, Any]], index: Index) -> None:
    rows = [
        (
            str(version["version"]),
            version["status"],
            _format_time(version["created"]) if "created" in version else "",
            str(version.get("runs", "")),
            str(version.get("rows", "")),
            str(version.get("models", "")),
            _check(version) if "created" in version else version["why"],
        )
        for version in versions
    ]
    print_table(("VERSION", "STATUS", "CREATED", "RUNS", "ROWS", "MODELS", "CHECK: OFF BY"), rows)
    if not index.current:
        click.echo("none of them is current: predictions use physics and data sheets")


def _attempt_row(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    version = str(attempt.get("version", ""))
    return (_format_time(attempt["ts"]), attempt["outcome"], version, attempt.get("reason", ""), attempt.get("why", ""))


def _check(version: Mapping[str, Any]) -> str:
    """Describe the check: the factors by which predictions were off."""
    check = version.get("check")
    if not check or not check["candidate"]:
        return "no data to check it with"
    parts = [
        f"{figure} x{math.exp(scores['error']):.2f} (before x{math.exp(check['current'][figure]['error']):.2f})"
        for figure, scores in check["candidate"].items()
    ]
    return ", ".join(parts)


def _named(version: int) -> str:
    return f"version {version}" if version else "physics alone (version 0)"


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def _print_model(found: Mapping[str, Any], config: Config) -> None:
    report, watched = found["report"], found["watch"]
    pairs = [("version", _named(found["version"]) + ("" if found["version"] == found["current"] else ", not current"))]
    if found["version"]:
        pairs += [
            ("created", f"{_format_time(found['created'])}, reason: {report.get('reason', '?')}"),
            ("learned from", f"{report.get('runs', 0)} runs, {report.get('measured', 0)} measured points"),
            ("rows", f"{found['rows']} of {found['models']} models"),
            ("check", _check(report)),
        ]
    for figure, kept in watched["kept"].items():
        mark = ", BELOW THE CONFIDENCE LEVEL" if kept["broken"] else ""
        promised = f"confidence level {config.learning.confidence:.0%}"
        pairs.append((f"{figure} kept", f"{kept['share']:.0%} of {kept['runs']} runs since ({promised}){mark}"))
    waiting = found["waiting"]
    next_ = f"due: {waiting['due']}" if waiting["due"] else f"{waiting['runs']} of {config.learning.min_new} new runs"
    pairs.append(("next refit", next_ if config.learning.enabled else f"{next_}; disabled in migbatch.toml"))
    print_pairs(pairs)
    rows = list(_drift_rows(report.get("trained", {}), watched["models"]))
    if rows:
        click.echo()
        print_table(("MODEL", "FIGURE", "THEN", "RUNS", "NOW", "RUNS", ""), rows)
    _print_left_out(report.get("left_out", {}))


def _drift_rows(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in sorted({*then, *now}):
        for figure in ("time", "memory", "ttft", "tpot"):
            before, since = then.get(name, {}).get(figure), now.get(name, {}).get(figure)
            if before is None and since is None:
                continue
            ratio = since["ratio"] / (before["ratio"] if before else 1.0) if since else 1.0
            mark = "drifts: included in the next refit" if not 1 / _DRIFTS < ratio < _DRIFTS else ""
            yield (name, figure, *_ratio(before), *_ratio(since), mark)


def _ratio(ratio: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("-", "0") if ratio is None else (f"{ratio['ratio']:.2f}", str(ratio["runs"]))


def _print_left_out(left_out: Mapping[str, Any]) -> None:
    for name, figures in sorted(left_out.items()):
        for figure, errors in sorted(figures.items()):
            whose = f"{plural(errors['runs'], 'run')} of {plural(errors['users'], 'user')}"
            away = f"up to a factor of {errors['factor']:g} from other data or physics"
            click.echo(f"rejected: {figure} of {name} in {whose}, {away}")
