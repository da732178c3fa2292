"""`migbatch profile run --server`: measure a served language model."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_migbatch.cli.common import print_table
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.profile_options import RunOptions
from slurm_migbatch.cli.profile_output import milliseconds, no_progress
from slurm_migbatch.daemon.addresses import is_local, resolved
from slurm_migbatch.profiling.completions import RunningServer, ServerAddress, ServerConnection, ServerError, find
from slurm_migbatch.profiling.device import Device, find_device
from slurm_migbatch.profiling.ladder import LadderFindings, ServedModel, climb
from slurm_migbatch.profiling.load import LoadEffort, LoadPoint, LoadRefused, LoadResult, Percentiles, Prompts
from slurm_migbatch.profiling.load import measure_load as measure
from slurm_migbatch.profiling.table import save
from slurm_migbatch.workload.llmhints import CHOICES

if TYPE_CHECKING:
    from slurm_migbatch.profiling.measurement import Measurement

INPUTS: Final = (128, 1024)
OUTPUTS: Final = (128,)
"""Default lengths in tokens."""
KEY: Final = "OPENAI_API_KEY"
_ANSWER_S: Final = 60.0
"""Timeout of a silent server before the first measurement."""
_HEADER: Final = (
    "AT_ONCE", "IN", "OUT", "TTFT50", "90", "99_MS", "TPOT50", "90", "99_MS", "TOKENS/S", "REQ/S", "N", "FAILED",
)  # fmt: skip
_NOBODY_MIB: Final = 64.0
"""Memory below which a device serves nothing."""


def run_server(options: RunOptions, earlier: Sequence[Measurement], model: str, *, precision: str, source: str) -> None:
    """Measure the server and print the results; `model` is its name in jobs. Raises Failure."""
    try:
        address = ServerAddress.parse(options.server or "")
    except ValueError as error:
        raise click.UsageError(f"--server: {error}") from None
    if not any(map(is_local, resolved(address.host))):
        raise Failure(
            f"{address.host} is not an address of this host: run the command in the job of the server, so that the "
            "rows name the slice"
        )
    device = find_device(options.device, os.environ)
    try:
        served = find(address, options.served_name, os.environ.get(KEY, ""), _ANSWER_S)
    except ServerError as error:
        raise Failure(f"--server: {error}") from None
    engine = options.engine or served.engine
    if not engine:
        raise click.UsageError(f"the server does not name its engine: give --engine {'|'.join(CHOICES['engine'])}")
    subject = ServedModel(device, model, engine, precision, options.family.lower() or "decoder", source, options.params)
    inputs, outputs = options.inputs or INPUTS, options.outputs or OUTPUTS
    points = [LoadPoint(c, i, o) for i in inputs for o in outputs for c in options.batches]
    possible = [point for point in points if served.longest is None or point.tokens <= served.longest]
    if not possible:
        raise Failure(f"the server accepts sequences of at most {served.longest} tokens: reduce --inputs or --outputs")
    if not options.quiet:
        words = f"{model} served by {engine} at {served.address} on {device}"
        click.echo(f"{words}: {len(possible)} points at most", err=True)
    longest = max(options.max_seconds, options.min_seconds)
    effort = LoadEffort(options.warmup, options.repeats, options.min_seconds, longest, options.timeout)
    table = options.table
    try:
        found = climb(
            subject,
            possible,
            _Measuring(served, effort, device),
            earlier,
            partial(save, table),
            no_progress if options.quiet else _print_point,
            time.monotonic() + options.total_seconds,
        )
    except KeyboardInterrupt:
        click.echo(f"interrupted; the results are in {table}, continue with --resume", err=True)
        raise
    found.left += [point for point in points if point not in possible]
    if options.as_json:
        click.echo(json.dumps(_json(subject, served, found, table)))
    else:
        _print(found, table, len(earlier))
    if not found.rows:
        raise Failure(f"nothing was measured: {found.refused[0][1]}" if found.refused else "nothing was measured")


class _Measuring:
    """Measures a point on a server; the text of each length is determined once."""

    def __init__(self, served: RunningServer, effort: LoadEffort, device: Device) -> None:
        self._served, self._effort, self._device = served, effort, device
        self._prompts: dict[int, Prompts] = {}

    def __call__(self, point: LoadPoint) -> tuple[LoadResult, float | None]:
        """Return the result, and the MiB in use on the device."""
        salt = secrets.token_hex(8)
        if point.inputs not in self._prompts:
            line: ServerConnection = self._served.line(self._effort.timeout)
            try:
                self._prompts[point.inputs] = Prompts.asked(self._served, line, point.inputs, salt)
            except ServerError as error:
                raise LoadRefused(str(error), {str(error): 1}) from None
            finally:
                line.close()
        result = measure(self._served, point, self._prompts[point.inputs], self._effort, salt)
        return result, self._memory_mib()

    def _memory_mib(self) -> float | None:
        if self._device.is_cpu:
            return None
        from slurm_migbatch.mig.nvml.visible import VisibleDevice

        with VisibleDevice(self._device.visible) as visible:
            used = visible.usage().used
        if used < _NOBODY_MIB:
            raise Failure(
                f"only {used:.0f} MiB are in use on {self._device}: it runs on another device; give its --device"
            )
        return used


def _print_point(point: LoadPoint, outcome: LoadResult | LoadRefused) -> None:
    """Print one line for a point."""
    if isinstance(outcome, LoadRefused):
        click.echo(f"{point}: no figures: {outcome}", err=True)
        return
    tpot = "" if outcome.tpot is None else f", {milliseconds(outcome.tpot.p50)} ms a token"
    errors = f", {outcome.failed} failed" if outcome.failed else ""
    click.echo(
        f"{point}: first token {milliseconds(outcome.ttft.p50)} ms{tpot}, {outcome.tokens_s:.4g} tokens/s{errors}",
        err=True,
    )


def _print(found: LadderFindings, table: Path, earlier: int) -> None:
    lines = [
        (
            str(row.point.concurrency),
            str(row.inputs),
            str(row.outputs),
            *(milliseconds(row.ttft.at[share]) for share in (0.5, 0.9, 0.99)),
            *(milliseconds(row.tpot.at[share] if row.tpot else None) for share in (0.5, 0.9, 0.99)),
            f"{row.tokens_s:.4g}",
            f"{row.requests_s:.4g}",
            str(row.request.count),
            str(row.failed),
        )
        for row in found.results
    ]
    print_table(_HEADER, lines)
    for point, error in found.refused:
        click.echo(f"no figures for {point}: {error}")
    if found.left:
        click.echo(f"not tried: {len(found.left)} points (the server refused a smaller load or such lengths, or the "
                   "time limit was reached; --resume tries again)")  # fmt: skip
    if any(row.outputs != row.point.outputs or row.inputs != row.point.inputs for row in found.results):
        click.echo("the actual lengths are shown if the server did not use the requested ones")
    click.echo(f"{table}: {len(found.results)} new rows" + (f", {earlier} existing" if earlier else ""))


def _json(subject: ServedModel, served: RunningServer, found: LadderFindings, table: Path) -> dict[str, Any]:
    def times(of: Percentiles | None) -> dict[str, float] | None:
        return None if of is None else {"mean": of.mean, **{f"p{100 * share:g}": t for share, t in of.at.items()}}

    device = subject.device
    return {
        "model": subject.model,
        "engine": subject.engine,
        "precision": subject.precision or None,
        "server": {"url": str(served.address), "name": served.name, "api": served.form, "longest": served.longest},
        "device": {"gpu": device.gpu, "uuid": device.visible or None, "profile": device.profile or None},
        "table": str(table),
        "rows": [row.to_dict() for row in found.rows],
        "points": [
            {
                "concurrency": result.point.concurrency,
                "input": result.inputs,
                "output": result.outputs,
                "requests": result.request.count,
                "seconds": result.seconds,
                "ttft_s": times(result.ttft),
                "tpot_s": times(result.tpot),
                "request_s": times(result.request),
                "requests_per_s": result.requests_s,
                "tokens_per_s": result.tokens_s,
                "errors": dict(result.errors),
            }
            for result in found.results
        ],
        "refused": [{**point._asdict(), "why": str(error), "errors": error.errors} for point, error in found.refused],
        "left": [point._asdict() for point in found.left],
    }
