"""`migbatch profile run`: measure a model on this host."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import NumberRange, converted
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.profile_options import RunOptions
from slurm_migbatch.cli.profile_output import findings_json, print_findings, progress
from slurm_migbatch.profiling import cells as cells_
from slurm_migbatch.profiling.cells import CellError, MeasurementCell
from slurm_migbatch.profiling.measurement import RUN_KINDS, TEXT_LENGTHS, Measurement, Tuning
from slurm_migbatch.profiling.target import Python, TargetError, parse_command, parse_python
from slurm_migbatch.profiling.timing import Effort
from slurm_migbatch.workload.llmhints import CHOICES

if TYPE_CHECKING:
    from slurm_migbatch.profiling.device import Device
    from slurm_migbatch.profiling.measure import DidNotFit, Program, Ran
    from slurm_migbatch.profiling.runner import ProfiledModel

_PLOT = ".svg"
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


_list = converted(partial(cells_.numbers, doubling=False))
_range = converted(partial(cells_.numbers, doubling=True))


def _count(value: str) -> float:
    factor = _FACTORS.get(value[-1:].lower(), 1.0)
    try:
        number = float(value[:-1] if factor > 1 else value) * factor
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"'{value}' is not a number above 0: write 25.6m, 4.1g or 1.8e9")
    return number


def _tuning(value: str) -> str:
    Tuning.parse(value.lower())
    return value.lower()


def _slo(value: str) -> float:
    from slurm_migbatch.workload.units import duration_us

    microseconds = duration_us(value)
    if not microseconds:
        raise ValueError(f"'{value}' is not a time with a unit: write 200ms or 0.2s")
    return microseconds / 1e6


@click.command(short_help="Measure a model on the GPU, slice or CPU of this process.")
@click.argument("target", required=False, metavar="[TARGET]")
@click.option("--command", metavar="TEXT", help="Program to measure instead of TARGET; see above.")
@click.option("--server", metavar="URL", help="Running OpenAI-compatible server to measure instead; see above.")
@click.option("--model", required=True, metavar="NAME", help="Model name as in jobs' model=NAME.")
@click.option("--family", default="", metavar="WORD", help="cnn, vit, encoder, decoder, ...")
@click.option(
    "--kind",
    type=click.Choice(RUN_KINDS),
    default="infer",
    show_default=True,
    help="Whether a batch is a forward pass (infer) or a step (train).",
)
@click.option(
    "--batches",
    callback=_range,
    default="1-32",
    show_default=True,
    metavar="LIST",
    help="Batch sizes: 1,8,24 or a doubling range, 1-256.",
)
@click.option(
    "--inputs",
    callback=_range,
    default=None,
    metavar="LIST",
    help="Input sizes (tokens, pixels): 128,512 or 128-2048; none by default.",
)
@click.option(
    "--procs",
    callback=_list,
    default="1",
    show_default=True,
    metavar="LIST",
    help="Concurrent identical processes: 1-3. They share the device as configured (MPS, else time slicing).",
)
@click.option(
    "--points", type=click.IntRange(1, 1000), metavar="N", help="Measure the N most informative combinations."
)
@click.option(
    "--slo",
    callback=converted(_slo),
    metavar="TIME",
    help="With --points: those that a service with this batch time limit would run, 200ms.",
)
@click.option("--grid", is_flag=True, help="Measure all combinations, ascending (the default).")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Table [default: NAME.csv].")
@click.option("--resume", is_flag=True, help="Continue the table: keep its rows, measure missing ones.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.svg", help="Draw the curves.")
@click.option("--device", metavar="NAME", help="cpu, an index or a UUID [default: CUDA_VISIBLE_DEVICES].")
@click.option("--python", metavar="PATH", help="Python for the target [default: the active environment's, else this].")
@click.option("--warmup", type=click.IntRange(1, 1000), default=3, show_default=True, help="Batches before timing.")
@click.option(
    "--repeats", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Minimum number of timed batches."
)
@click.option(
    "--min-seconds",
    type=NumberRange(0, 3600),
    default=1.0,
    show_default=True,
    help="Minimum time of timed batches.",
)
@click.option(
    "--max-seconds",
    type=NumberRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Maximum time of timed batches.",
)
@click.option(
    "--timeout", type=NumberRange(1, 86400), default=900.0, show_default=True, help="Time limit for a point, in s."
)
@click.option(
    "--params", callback=converted(_count), metavar="N", help="Parameters, 25.6m [default: from a torch model]."
)
@click.option(
    "--flops", callback=converted(_count), metavar="N", help="Operations per item, 8.2g [default: counted by torch]."
)
@click.option(
    "--outputs",
    callback=_range,
    default=None,
    metavar="LIST",
    help="With --server: output tokens per request [default: 128].",
)
@click.option("--engine", type=click.Choice(CHOICES["engine"]), help="With --server: engine [default: detected].")
@click.option(
    "--precision",
    metavar="WORD",
    help="For a language model: bf16, fp8, awq, ... [default: from --model]. With --kind train, that of its matrix "
    "products.",
)
@click.option(
    "--tuning",
    callback=converted(_tuning),
    default="",
    metavar="WORDS",
    help="With --kind train, for a language model: lora, qlora/adamw_8bit, full/checkpointing [default: full/adamw].",
)
@click.option("--served-name", metavar="NAME", help="With --server: model name on a server with several.")
@click.option(
    "--total-seconds",
    type=NumberRange(1, 864000),
    default=3600.0,
    show_default=True,
    help="With --server: do not start points after this time.",
)
@click.option("--source", metavar="TEXT", help="Source of the rows [default: this command and the date].")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def run(**options: Any) -> None:
    """Measure a model over batch and input sizes on the GPU, MIG slice or CPU of this process.

    TARGET is module:callable or file.py:callable, a factory. It is called as make(batch), or make(batch, input_size)
    with --inputs, prepares everything, and returns a function that processes one batch:

    \b
      import torch, torchvision
      def make(batch, input_size):
          model = torchvision.models.resnet50().cuda().eval()
          images = torch.rand(batch, 3, input_size, input_size, device="cuda")
          return torch.inference_mode()(lambda: model(images))
    \b
      migbatch profile run bench.py:make --model resnet50 --inputs 224 --plot resnet50.svg

    Pending work of torch, jax and cupy is waited for; for others, give the function an attribute `sync`.

    With --command 'prog --batch {batch} --input {input}' a program is run once per point ({repeats} and {seconds}
    can be used too). It warms up, times batches, and prints a line for each: migbatch: items=32 seconds=0.0123. If the
    batch does not fit it prints migbatch: oom, or fails.

    Each point runs in separate processes. One that runs out of memory becomes a row without speed, and nothing larger
    is tried; any other error ends the run. The table is written after each point.

    With --server URL a language model is measured through its server, by streaming requests: time to first token, time
    per further token, tokens per second. --batches are concurrent requests, --inputs and --outputs tokens. Run it on
    the server's host, in its job; a key is read from OPENAI_API_KEY.

    \b
      migbatch profile run --server http://localhost:8000 --model llama-3.1-8b --batches 1-32 --inputs 128,1024
    """
    if options["server"] is not None:
        _run_server(RunOptions(**options))
    else:
        _run(RunOptions(**options))


def _run(options: RunOptions) -> None:
    from slurm_migbatch.profiling.device import NvmlMeter, find_device
    from slurm_migbatch.profiling.measure import DidNotFit, measure
    from slurm_migbatch.profiling.runner import first
    from slurm_migbatch.profiling.runner import run as run_points
    from slurm_migbatch.profiling.table import save

    points, path = options.points, options.table
    if points is not None and options.grid:
        raise click.UsageError("give either --points N or --grid")
    if points is None and options.slo is not None:
        raise click.UsageError("--slo requires --points N")
    wanted = _target(options.target, options.command, options.inputs)
    try:
        cells = cells_.product(options.batches, options.inputs or (None,), options.procs)
    except CellError as error:
        raise click.UsageError(str(error)) from None
    _check_names(options)
    earlier = _earlier(path, options.resume)
    device = find_device(options.device, os.environ)
    subject = _subject(options, device)
    subject.row(cells[0], DidNotFit(""))  # an option that no table can hold is refused before anything is measured
    program = _program(options, wanted)
    meter = None if device.is_cpu else NvmlMeter(device.visible)
    rule = first if points is None else partial(_most_informative, subject, options.slo)
    most = len(cells_.open_cells(cells, filter(subject.owns, earlier)))
    with progress(subject, most if points is None else min(points, most), options.quiet) as (before, after):

        def bench(cell: MeasurementCell) -> Ran | DidNotFit:
            before(cell)
            return measure(program, device, meter, cell)

        try:
            found = run_points(subject, cells, rule, bench, earlier, partial(save, path), after, points)
        except KeyboardInterrupt:
            click.echo(f"interrupted; the results are in {path}, continue with --resume", err=True)
            raise
    if options.plot is not None:
        from slurm_migbatch.profiling.plot import draw

        title = f"{subject.model} on {device.gpu} {device.profile}".rstrip()
        options.plot.write_text(draw(found.rows, title), encoding="utf-8")
    if options.as_json:
        click.echo(json.dumps(findings_json(subject, device, found, path)))
    else:
        print_findings(found, path, len(earlier))


def _run_server(options: RunOptions) -> None:
    from slurm_migbatch.cli.profile_server import run_server

    others = {
        "TARGET": options.target, "--command": options.command, "--points": options.points, "--slo": options.slo,
        "--plot": options.plot, "--procs": tuple(options.procs) != (1,), "--kind": options.kind != "infer",
        "--flops": options.flops, "--python": options.python, "--tuning": options.tuning,
    }  # fmt: skip
    if wrong := [name for name, given in others.items() if given]:
        raise click.UsageError(f"{wrong[0]} cannot be used with --server")
    _check_names(options)
    earlier = _earlier(options.table, options.resume)
    run_server(
        options, earlier, _model(options.model), precision=_precision(options.precision), source=_source(options)
    )


def _precision(word: str | None) -> str:
    """Return the precision in the form of the hints `quantization` and `dtype`."""
    from slurm_migbatch.predict.llm import precision

    name = (word or "").lower().replace("_", "-")
    found = precision.plain(name) if name in precision.DTYPES else precision.quantized(name) if name else None
    if name and found is None:
        raise click.UsageError("--precision must be a value of quantization= or dtype=: bf16, fp8, awq, q4_k_m")
    return found.name if found else ""


def _source(options: RunOptions) -> str:
    return options.source if options.source is not None else f"migbatch profile run {time.strftime('%Y-%m-%d')}"


def _check_names(options: RunOptions) -> None:
    if options.plot is not None:
        if options.plot.suffix.lower() != _PLOT:
            raise click.UsageError(f"--plot writes SVG: use {options.plot.with_suffix(_PLOT)}")
        from slurm_migbatch.profiling.plot import require

        require()  # before anything is measured
    if options.source is not None and len(options.source) > TEXT_LENGTHS["source"]:
        raise click.UsageError(f"--source takes at most {TEXT_LENGTHS['source']} characters")


def _subject(options: RunOptions, device: Device) -> ProfiledModel:
    from slurm_migbatch.profiling.runner import ProfiledModel

    return ProfiledModel(
        device=device,
        model=_model(options.model),
        family=options.family.lower(),
        kind=options.kind,
        params=options.params,
        flops_per_item=options.flops,
        source=_source(options),
        tuning=options.tuning,
        precision=_precision(options.precision),
    )


def _program(options: RunOptions, target: Python | tuple[str, ...]) -> Program:
    from slurm_migbatch.profiling.measure import Program

    longest = max(options.max_seconds, options.min_seconds)
    return Program(
        target,
        _interpreter(options.python, os.environ),
        Effort(options.warmup, Effort.warmup_seconds, options.repeats, options.min_seconds, longest),
        options.timeout,
        count_flops=options.kind == "infer" and options.flops is None,
    )


def _most_informative(
    subject: ProfiledModel, limit_s: float | None, done: Sequence[Measurement], open_: Sequence[MeasurementCell]
) -> MeasurementCell | None:
    """Choose the next cell to measure by the predictor's own rule, or by the one for a limit."""
    try:
        from slurm_migbatch.predict.known import ModelKnowledge
        from slurm_migbatch.predict.points import choose
    except ImportError as error:
        raise click.ClickException(
            f"--points needs the predictor, which is not installed ({error}): install slurm-migbatch[controller], "
            "or measure all combinations with --grid"
        ) from None
    from slurm_migbatch.profiling.measure import DidNotFit

    rows = [subject.row(cell, DidNotFit("")) for cell in open_]
    index = choose(done, rows, ModelKnowledge(), limit_s)
    return None if index is None else open_[index]


def _target(target: str | None, command: str | None, inputs: Sequence[int] | None) -> Python | tuple[str, ...]:
    if (target is None) == (command is None):
        raise click.UsageError("give either a TARGET (file.py:callable) or --command")
    try:
        return parse_python(target) if target is not None else parse_command(command or "", inputs is not None)
    except TargetError as error:
        raise click.UsageError(str(error)) from None


def _model(name: str) -> str:
    """Return the name in the form of a job's hint."""
    from slurm_migbatch.workload import hints
    from slurm_migbatch.workload.refusal import Refusal

    try:
        hints.parse(f"{hints.PREFIX} model={name}")
    except Refusal:
        raise click.UsageError(f"--model is {hints.MODEL_FORM}, as jobs write it") from None
    return name.lower()


def _earlier(path: Path, resume: bool) -> list[Measurement]:
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise Failure(f"no such directory: {path.absolute().parent}")
        return []
    if not resume:
        raise Failure(f"{path} exists: use --resume to complete it, or -o FILE for another table")
    from slurm_migbatch.profiling.table import read_folder

    return read_folder(path)


def _interpreter(program: str | None, environ: Mapping[str, str]) -> str:
    """Return the Python of the active virtual or conda environment, which has the target's packages."""
    if program is not None:
        found = shutil.which(program)
        if found is None:
            raise Failure(f"--python: {program} cannot be run")
        return found
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = Path(environ.get(variable) or os.devnull, "bin", "python")
        if candidate.is_file():
            return str(candidate)
    return sys.executable
