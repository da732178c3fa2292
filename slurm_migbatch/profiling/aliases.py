"""Read column names, units and cells of tables that others made as those of the common table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from slurm_migbatch.mig.profile import SUFFIX_FORM, Profile, ProfileError
from slurm_migbatch.profiling import statedunits
from slurm_migbatch.profiling.jsonfile import MISSING
from slurm_migbatch.profiling.measurement import COLUMNS, CPU, OF_SPEED, SERVE, TEXT_LENGTHS, MeasurementError
from slurm_migbatch.profiling.oom import reports_oom
from slurm_migbatch.workload.refusal import show

_IN_USE: Final = ("{}", "peak_{}", "{}_used", "{}_usage", "peak_{}_used", "peak_{}_usage", "max_{}_used")
"""What may stand around the word for memory. What a framework has allocated is not all that a slice needs, and a
maximum may be the GPU's memory.
"""
_OF_BATCH: Final = (
    "step_time", "batch_time", "iteration_time", "iter_time", "time_per_batch", "time_per_step", "time_per_iteration",
    "batch_latency", "latency_per_batch", "avg_step_time", "mean_step_time", "avg_batch_time", "mean_batch_time",
    "p50", "p50_latency", "median_latency",
)  # fmt: skip
"""Names of the time of a batch or of a training step: the mean or, where a table has no other, the median."""
_REQUESTS_AT_ONCE: Final = ("concurrency", "max_concurrency", "concurrent_requests", "num_concurrent_requests")
_REQUESTS: Final = ("request_throughput", "request_throughput_req_s", "req_s", "requests_s", "requests_per_s", "rps")
"""Names of the batch and of the throughput of a server, whose items are requests."""
_NAMES: Final = (
    ("gpu", 1.0, "gpu_name gpu_model gpu_type accelerator accelerator_name"),
    ("model", 1.0, "model_name network"),
    ("profile", 1.0, "mig_profile mig_slice slice"),
    ("batch", 1.0, "batch_size batchsize bs infer_batch_size"),
    ("procs", 1.0, "processes num_processes num_procs n_procs nprocs proc num_proc n_proc nproc"),
    ("input_size", 1.0, "seq_len seq_length sequence_length image_size img_size infer_img_size resolution"),
    ("input_size", 1.0, "input_len input_length input_resolution isl"),
    ("output", 1.0, "output_len output_length osl"),
    ("sm_count", 1.0, "sms"),
    ("throughput_per_s", 1.0, "throughput throughput_s throughput_img_s throughput_imgs_s throughput_images_s"),
    ("throughput_per_s", 1.0, "throughput_samples_s throughput_items_s"),
    ("throughput_per_s", 1.0, "throughput_infer_s throughput_inferences_s throughput_fps infer_s inferences_s fps"),
    ("throughput_per_s", 1.0, "img_s imgs_s images_s samples_s items_s"),
    ("throughput_per_s", 1.0, "images_per_s imgs_per_s samples_per_s items_per_s inferences_per_s"),
    ("throughput_per_s", 1.0, "infer_samples_per_s"),
    ("latency_s", 1e-3, "infer_step_time"),
    ("latency_s", 1.0, "mean_latency_s avg_latency_s average_latency_s"),
    ("latency_s", 1e-3, "latency_ms mean_latency_ms avg_latency_ms average_latency_ms"),
    ("latency_s", 1e-6, "latency_us mean_latency_us avg_latency_us average_latency_us"),
    ("latency_p99_s", 1e-3, "latency_p99_ms p99_ms"),
    ("latency_p99_s", 1e-6, "latency_p99_us p99_us"),
    ("ttft_s", 1e-3, "ttft_ms median_ttft_ms"),
    ("ttft_p99_s", 1e-3, "ttft_p99_ms"),
    ("tpot_s", 1e-3, "tpot_ms median_tpot_ms"),
    ("tpot_p99_s", 1e-3, "tpot_p99_ms"),
    *(
        ("memory_mib", factor, " ".join(f"{form.format(memory)}_{unit}" for form in _IN_USE))
        for unit, factor in (("mb", 1.0), ("mib", 1.0), ("gb", 1024.0), ("gib", 1024.0), ("bytes", 2.0**-20))
        for memory in (
            "memory",
            "mem",
            "vram",
            "gpu_memory",
            "gpu_mem",
            "fb_used",
            "frame_buffer_used",
            "framebuffer_used",
        )
    ),
    ("precision", 1.0, "dtype torch_dtype weight_dtype weights_dtype model_dtype"),
    ("precision", 1.0, "quantization quantisation quant quant_method quantization_method"),
    ("engine", 1.0, "serving_engine inference_engine"),
    ("params", 1e6, "params_m"),
    ("params", 1e9, "params_b"),
    ("flops_per_item", 1e9, "gflops"),
    ("flops_per_item", 2e9, "infer_gmacs gmacs"),
)
_WEAKER: Final = (
    ("model", 1.0, "model_id"),
    ("profile", 1.0, "mig mig_type mig_size mig_partition mig_instance_type mig_instance_profile"),
    ("profile", 1.0, "gpu_instance_profile instance_profile gi_profile"),
    (
        "input_size",
        1.0,
        "input_shape image_shape train_img_size random_input_len imgsz seqlen prompt_len prompt_length",
    ),
    ("output", 1.0, "random_output_len"),
    ("batch", 1.0, "per_device_train_batch_size micro_batch_size train_batch_size"),
    ("throughput_per_s", 1.0, "train_samples_per_s"),
    *(("batch", 1.0, name) for name in _REQUESTS_AT_ONCE),
    *(("throughput_per_s", 1.0, name) for name in _REQUESTS),
    ("latency_s", 1e-3, "e2el_ms median_e2el_ms mean_e2el_ms e2e_latency_ms request_latency_ms"),
    ("ttft_s", 1e-3, "mean_ttft_ms avg_ttft_ms time_to_first_token_ms"),
    ("tpot_s", 1e-3, "itl_ms mean_tpot_ms avg_tpot_ms time_per_output_token_ms inter_token_latency_ms"),
    *(
        ("latency_s", factor, " ".join(f"{form}_{unit}" for form in _OF_BATCH))
        for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    ),
)
"""Names that mean a column unless another one of the table does."""
WEAKER: Final = frozenset(name for _, _, names in _WEAKER for name in names.split())
_OF_REQUESTS: Final = frozenset({*_REQUESTS_AT_ONCE, *_REQUESTS})
ALIASES: Final[Mapping[str, tuple[str, float]]] = {
    name: (column, factor) for column, factor, names in (*_NAMES, *_WEAKER) for name in names.split()
}
"""Column of the common table and factor, by name in another table, such as the benchmarks of timm and vLLM. A MB or GB
counts as a MiB or GiB: programs that print them mostly mean these, and too much memory ends no job.
"""
_ANY_ORDER: Final = frozenset({"latency", "ttft", "tpot", "itl", "memory", "mem", "vram"})
"""Words of names that mean the same in any order, unlike those of rates (`s/img`)."""
_BY_WORDS: Final = {
    tuple(sorted(name.split("_"))): name for name in ALIASES if not _ANY_ORDER.isdisjoint(name.split("_"))
}
_NOT_RUN: Final = re.compile(r"(?![0-9]).*?(?<![a-z0-9])(?:cuda|gpu)?oom(?![a-z0-9])", re.IGNORECASE)
"""Beginning of the cell of a figure of a point that did not run, `FAILED (OOM)`, besides those that report it in full
(CUDA out of memory). Others without a number (N/A) are refused: an empty speed means the same, and they may mean that
nobody measured it.
"""
_OF_STATUS: Final = frozenset([
    "status", "run_status", "exit_status", "state", "result", "outcome", "error", "error_message", "error_type",
    "failure", "failure_reason", "success", "passed", "completed",
])  # fmt: skip
"""Names of columns that say why a point has no speed."""
_WHOLE: Final = frozenset({"full", "whole", "none", "n/a", "na", "-", "off", "no mig", "nomig"})
"""Cells of the column `profile` for a whole GPU without MIG."""
_PROFILE: Final = re.compile(r"(?:mig[ _-]?)?([1-9][0-9]?)g[ ._-]?([0-9]{1,3})gb(.*)")
SLICE: Final = re.compile(
    r"[ _-]*[(\[]?(?<![0-9a-z])(?:mig[ _-]*)?"
    rf"((?:[1-9]c\.)?[1-9][0-9]?g[ ._-]?[0-9]{{1,3}}gb(?:{SUFFIX_FORM}))(?![0-9a-z])[)\]]?",
    re.IGNORECASE,
)
"""A slice in the name of a GPU, with what separates it from the name, or a cell that names one."""
_COMPUTE_INSTANCE: Final = re.compile(r"(?:mig[ _-]*)?([1-9])c\.([1-9])g\b.*", re.IGNORECASE)
"""A compute instance, with its compute slices and those of the GPU instance that it is in."""
_OF_SLICES: Final = frozenset([
    "gi", "gi_id", "gi_profile_id", "gpc", "gpcs", "n_gpcs", "num_gpcs", "gpu_instance", "gpu_slice", "gpu_slices",
    "num_slices", "profile_id", "slice_size", "slices",
])  # fmt: skip
"""Names of columns, besides those with the word `mig`, whose cells say which part of the GPU a row is of."""
_NO_SLICE: Final = _WHOLE | {"", "0", "no", "false", "disabled", "[n/a]"}
_BARE: Final = re.compile(r"[1-7](?:g|/7)", re.IGNORECASE)
"""A slice by its compute alone."""
_OF_INSTANCES: Final = frozenset({"instance", "partition"})
_OF_PARTS: Final = frozenset({"fraction", "share", "quota", "portion"})
_OF_COMPUTE: Final = frozenset({"gpu", "sm", "sms", "compute", "core", "cores", "cuda", "mps", "percent"})
_OF_MEMORY: Final = frozenset({"mem", "memory", "ram", "shm", "vram"})
"""Words in the names of columns: of slices, of parts of a GPU with any of the words after them, and of memory."""
_QUARTER: Final = re.compile(r"[1-7]/[48]")
_PART: Final = re.compile(r"0?\.[0-9]+|(?!1(?:\.0+)?$)[1-9][0-9]?(?:\.[0-9]+)?%?")
"""A part of a GPU as a number, `0.25` or `25`, or in percent."""
_PERCENT: Final = re.compile(r"[0-9]{1,2}(?:\.[0-9]+)?%?")
_WITHOUT_GPU: Final = re.compile(r"cpu(?:executionprovider)?", re.IGNORECASE)
"""A cell that says that a row ran on no GPU."""
_UUID: Final = re.compile(r"MIG-(?:GPU-)?[0-9a-f-]{32,}(?:/[0-9]+/[0-9]+)?")
"""The UUID of a slice."""
_OF_SERVERS: Final = frozenset({"output", "ttft_s", "tpot_s"})
"""Columns of servers of language models: without a kind such a row would be one of inference, which corrects no server.
"""
_COPIES: Final = frozenset({"colocated", "copies", "instances", "jobs", "located", "replicas", "slicing", "tenants"})
_COPY: Final = frozenset({"instance", "mig", "mps", "model", "models", "process", "processes", "replica"})
_COUNTING: Final = frozenset({"count", "mps", "n", "num", "number"})
"""Words in the names of columns with a number of slices, or of programs on one: one of the first, or one of each other
set.
"""
_CONCURRENT: Final = re.compile(r"(?:.*_)?(?:concurrency|concurrent(?:_.*)?|in_?flight(?:_.*)?|clients|streams|users)")
"""Names of columns with a number of requests at a time."""
_WHOLE_BATCH: Final = re.compile(r"(?:.*_)?(?:effective|global|total)_(?:[a-z]+_)?batch(?:_size)?")
"""Names of columns with the items of a training step, of which a batch may be a part."""
_KINDS: Final = {"inference": "infer", "serving": "serve"}
_PRECISIONS: Final = {
    **dict.fromkeys(("float16", "half", "f16", "fp-16", "float-16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf-16"), "bf16"),
    **dict.fromkeys(("float32", "float", "single", "f32", "fp-32", "float-32"), "fp32"),
    **dict.fromkeys(("fp8-e4m3", "fp8-e5m2", "fp8-e4m3fn", "float8", "float8-e4m3fn", "float8-e5m2"), "fp8"),
    **dict.fromkeys(("auto", "none", "no", "false", "unquantized", "n/a", "na", "-"), ""),
}
"""Usual precision by other words for it; empty: as in the model's name."""
_UNQUANTIZED: Final = frozenset({"", "fp16", "bf16", "fp32", "tf32"})
_ENGINES: Final = {
    **dict.fromkeys(("tensorrtllm", "trtllm"), "trtllm"),
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    **dict.fromkeys(("tgi", "textgenerationinference"), "tgi"),
    "ollama": "ollama",
    **dict.fromkeys(("transformers", "huggingfacetransformers", "hftransformers"), "transformers"),
}
"""Engine by the letters of its name."""
_RELEASE: Final = re.compile(r"[ _=(-]*v?[0-9]+(?:\.[0-9a-z]+)+.*")
"""The release after the name of an engine: `vLLM v0.6.3`."""
_TRAINING: Final = re.compile(
    r"(?:(?:pre|fine)[-_ ]?)?(?:train|tun)(?:e|ing)?|sft|(?:fwd|forward)[ ,&+/_-]*(?:and )?(?:bwd|backward)(?: pass)?",
    re.IGNORECASE,
)
"""A cell that says that a row is one of training."""
_IS_TRAINING: Final = re.compile(r"(?:is_)?train(?:ing)?(?:_mode)?")
_YES: Final = frozenset({"1", "true", "yes", "y", "on"})
"""Names of columns that say so by a cell of these."""
_OF_TRAINING: Final = re.compile(
    r"optimi[sz]er(?:_name)?|learning_rate|lr|grad(?:ient)?_acc.*|(?:.*_)?backward(?:_.*)?"
)
"""Names of columns that only tables of trainings have."""
_ACCUMULATED: Final = re.compile(r"(?:.*_)?grad(?:ient)?_acc.*|accum(?:ulation)?(?:_steps)?")
"""Names of columns with the number of batches of a training step."""
_NO_ITEMS: Final = re.compile(r"(tok)|\b(?:batch(?:es)?|steps?|it(?:er(?:ation)?)?s?) ?(?:/|per)", re.IGNORECASE)
"""A unit of throughput that counts tokens (the group) or batches."""
_INDEX: Final = re.compile(r"(?:cuda:?|gpu:? ?)?[0-9]{1,2}", re.IGNORECASE)
"""A GPU by its number on a machine, in tables of others."""
_OF_DATA: Final = frozenset({"data", "dataset", "split"})
"""Words of a column's name by which `train` is a part of a data set."""
_OF_GPUS: Final = frozenset({"accelerators", "devices", "gpus", "ngpu", "ngpus", "nnodes", "tp"})
_ONE_OF_GPUS: Final = re.compile(
    r"(?:n|num)_gpu|gpu_(?:count|num)|(?:tensor|pipeline|data)_parallel(?:_size)?|world_size|device_count"
)
"""Words of the names of columns with the number of GPUs, or of nodes of a cluster, that a row is of, and such names."""
_OF_GPU: Final = re.compile(r"([0-9]+)(?:\.0+)? ?(?:x|gpus?|nodes?)?", re.IGNORECASE)
_BY: Final = r" ?[x\N{MULTIPLICATION SIGN}*] ?"
_SIDES: Final = re.compile(
    rf"(?:(?:[0-9]+{_BY})?[134]{_BY})?([0-9]{{1,6}}){_BY}([0-9]{{1,6}})(?:{_BY}[134])?", re.ASCII
)
"""The two sides of an image; the longer one counts, as in the hint `input=`. Before them may be the batch and the
channels, after them the channels.
"""
_SHAPE: Final = re.compile(
    r"[(\[](?:(?:[0-9]{1,6}, ?)?[134], ?)?([0-9]{1,6}), ?([0-9]{1,6})(?:, ?[134])?[)\]]|"
    r"(?:(?:[0-9]{1,6},)?[134],)?([0-9]{3}),(\3)",
    re.ASCII,
)
"""The same as Python writes a shape, `(3, 224, 224)`; without brackets only with equal sides, `3,224,224`, because
commas also separate thousands (`131,072`).
"""
_WITH_UNIT: Final = re.compile(r"([0-9]+) ?(?:px|pixels?|tok|tokens?)", re.ASCII)
"""An input size with its unit, as in that hint."""
_SCATTER: Final = re.compile(r"(?<=[0-9]) ?(?:\N{PLUS-MINUS SIGN}|\+/-) ?[0-9.,]+$")
"""What follows a mean in a cell: `20.5 +/- 1.1`."""
_GROUPED: Final = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DOTTED: Final = re.compile(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]+)?")
"""A number whose dots separate thousands, in a table that has decimal commas."""
_DECIMAL_COMMA: Final = re.compile(r"[+-]?[0-9]+,[0-9]+(?:[eE][+-]?[0-9]+)?", re.ASCII)
_DECIMAL_DOT: Final = re.compile(r"[+-]?[0-9]*\.[0-9]+(?:[eE][+-]?[0-9]+)?", re.ASCII)
TIMED_TOKENS: Final = ("ttft_s", "tpot_s", "output")
CONTRADICTORY: Final = "?"
"""Instead of the decimal mark of a table that has decimal commas and decimal dots."""
_NAMES_OF_MARKS: Final = {",": "comma", ".": "dot"}
_TEXTS: Final = frozenset({"kind", *TEXT_LENGTHS})
_SPELT_OUT: Final = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("msec", "msecs", "millisec", "millisecs", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("percentage", "pct"), "percent"),
    **dict.fromkeys(("usec", "usecs", "microsec", "microsecs", "microsecond", "microseconds"), "us"),
}
"""Usual unit by other words for it in a column's name."""
_UNITS: Final = str.maketrans({"\N{MICRO SIGN}": "u", "\N{GREEK SMALL LETTER MU}": "u", "%": " percent "})
"""Characters of a unit that are no ASCII letters: without them `Latency (\N{MICRO SIGN}s)` would be in seconds."""


def plain(name: str) -> str:
    """Return a column's name in words joined by _, with its unit: `Throughput (img/s)` is `throughput_img_s`."""
    words = re.findall(r"[a-z0-9]+", name.lower().translate(_UNITS))
    return "_".join(_SPELT_OUT.get(word, word) for word in words)


def usual_name(name: str) -> str:
    """Return a column's name as `plain` does, or the alias that has the same words: `Latency (ms) avg`."""
    usual = plain(name)
    return _BY_WORDS.get(tuple(sorted(usual.split("_"))), usual)


def renamed(header: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the common table for the columns of a header; others are unchanged.

    A name of the common table itself is never replaced, and no alias adds a column that the header already has.
    """
    own = set(header) & set(COLUMNS)
    usual = {ALIASES[called][0] for called in map(usual_name, header) if called in ALIASES and called not in WEAKER}
    names: list[str] = []
    for name in header:
        called = usual_name(name)
        alias = ALIASES.get(called, (called, 1.0))[0]
        taken = called in WEAKER and (alias in usual or alias in names)
        names.append(alias if name not in own and alias in COLUMNS and alias not in own and not taken else name)
    return tuple(names)


def decimal_mark(rows: Iterable[Mapping[str, str]], names: Mapping[str, str], separator: str) -> str:
    """Return the decimal mark of a table's numbers; "" if they do not tell, CONTRADICTORY if they have both.

    Spreadsheets separate cells by `;` where the comma is the decimal mark; by tabs they do it everywhere.
    """
    if separator == ",":
        return "."
    numeric = [name for name, column in names.items() if column in COLUMNS and column not in (*_TEXTS, "profile")]
    marks = {_mark(row[name].strip()) for row in rows for name in numeric}
    certain = [mark for mark in (",", ".") if (mark, True) in marks]
    if len(certain) > 1:
        return CONTRADICTORY
    return certain[0] if certain else "," if separator == ";" and (",", False) in marks else ""


def _mark(text: str) -> tuple[str, bool]:
    """Return the decimal mark of a number, "" if it has none, and whether it cannot separate thousands instead."""
    if _GROUPED.fullmatch(text):
        return (".", True) if text.count(",") > 1 or "." in text else (",", False)
    if _DOTTED.fullmatch(text):
        return (",", True) if text.count(".") > 1 or "," in text else (".", False)
    mark = "," if _DECIMAL_COMMA.fullmatch(text) else "." if _DECIMAL_DOT.fullmatch(text) else ""
    return mark, True


def converted(row: Mapping[str, str], names: Mapping[str, str], decimal: str) -> dict[str, str]:
    """Return the cells of a row in the units of the common table.

    `names`: its names, by the header's; `decimal`: the table's `decimal_mark`. Raises MeasurementError.
    """
    if MISSING in row.values():
        _check_missing(row, names)
        row = {name: "" if text == MISSING else text for name, text in row.items()}
    _check_unread(row, names)
    cells: dict[str, str] = {}
    for name, text in row.items():
        cell, before = _cell(name, names[name], text.strip(), decimal), cells.get(names[name], "")
        # of a data type and a quantization, the latter is the precision of the weights
        if names[name] != "precision" or not before or cell not in _UNQUANTIZED:
            cells[names[name]] = cell
    _check_names(row, names, cells)
    if cells.get("latency_s") and cells.get("kind", "").lower() != SERVE:
        _check_alone(row, names, cells.get("batch", ""))
    generated = next((name for name in row if names[name] in _OF_SERVERS and cells[names[name]]), None)
    if generated is not None and not cells.get("kind"):
        raise MeasurementError(f"{show(generated)} is that of a server: add the column kind, with serve there")
    if not OF_SPEED.intersection(cells):
        if cells.get("kind", "").lower() != SERVE:
            raise MeasurementError("a row that is not of a server needs throughput_per_s or latency_s")
        cells["latency_s"] = _of_tokens(*(cells.get(name, "") for name in TIMED_TOKENS))
    if not {*COLUMNS} <= {*row} and _INDEX.fullmatch(cells.get("gpu", "")):
        raise MeasurementError(f"gpu {show(cells['gpu'])} is a number: write the GPU's name (NVIDIA H100 80GB HBM3)")
    if not any(cells.get(name, "").strip("0.") for name in OF_SPEED):
        _check_failed(row, names)
    stated = next((text.strip() for name, text in row.items() if names[name] == "profile"), "")
    return _with_slice(cells, stated)


def _check_missing(row: Mapping[str, str], names: Mapping[str, str]) -> None:
    """Raise MeasurementError if an object in JSON has no figure that counts as a speed, not even an empty one."""
    speeds = [name for name in row if names[name] in (*OF_SPEED, *TIMED_TOKENS[:2])]
    if all(row[name] == MISSING for name in speeds):
        raise MeasurementError(
            f"it has none of {', '.join(map(show, speeds))}: leave it out, or if memory ran out there, add one that is "
            "null"
        )


def _check_failed(row: Mapping[str, str], names: Mapping[str, str]) -> None:
    """Raise MeasurementError if a column says that a point has no speed for another reason than memory."""
    speeds = [text for name, text in row.items() if names[name] in OF_SPEED]
    if any(says_oom(text.strip()) for text in speeds):
        return
    for name, text in row.items():
        cell = text.strip()
        if plain(name) in _OF_STATUS and cell and not says_oom(cell):
            raise MeasurementError(
                f"{show(name)} is {show(cell)}, but a row without a speed means that memory ran out: write OOM as "
                "the speed if it did, else leave the row out"
            )


def _of_tokens(first: str, each: str, output: str) -> str:
    """Return the seconds of a request by those of its tokens; "" if one of them is unknown."""
    try:
        begin, further, tokens = float(first), float(each), float(output)
    except ValueError:
        return ""
    return f"{begin + (tokens - 1) * further:.12g}" if min(begin, further, tokens) > 0 else ""


def _check_unread(row: Mapping[str, str], names: Mapping[str, str]) -> None:
    """Raise MeasurementError if a column that is not read says that a row is not what it would be read as: one of a
    whole GPU, of a single one, and of inference.
    """
    columns = {*names.values()}
    on_cpu = any(text.strip().lower() == CPU for name, text in row.items() if names[name] == "gpu")
    for name, text in row.items():
        if names[name] in COLUMNS:
            continue
        cell, called = text.strip(), plain(name)
        part = _COMPUTE_INSTANCE.fullmatch(cell)
        if part is not None and part[1] != part[2]:
            raise MeasurementError(f"{show(name)} is {show(cell)}: leave out what ran on a part of a GPU instance")
        words = {*called.split("_")}
        limited = "mps" in words or words >= {"active", "thread"}
        if limited and ("percent" in words or "%" in cell) and _PERCENT.fullmatch(cell) and cell.strip("0.%"):
            raise MeasurementError(f"{show(name)} is {show(cell)}: leave out what MPS limits to a part of the GPU")
        if _WITHOUT_GPU.fullmatch(cell) and not on_cpu:
            raise MeasurementError(f"{show(name)} is {show(cell)}: leave out what ran on no GPU")
        if "kind" not in columns:
            _check_inference(name, called, cell)
        counted = _OF_GPU.fullmatch(cell)
        if counted is not None and int(counted[1]) > 1 and "percent" not in words:
            _check_several(name, called, cell, columns)
        if "profile" not in columns:
            _check_whole(name, called, cell)
        if statedunits.is_of_units(called):
            _check_units(name, called, cell, names)


def _check_units(name: str, called: str, cell: str, names: Mapping[str, str]) -> None:
    """Raise MeasurementError if a cell states another unit than columns have by their names."""
    if other := _NO_ITEMS.search(cell):
        units = "tokens" if other[1] else "batches"
        raise MeasurementError(f"{show(name)} is {show(cell)}: throughput_per_s counts items, not {units}")
    columns = {plain(own): (column, _factor(own, column)) for own, column in names.items()}
    if wrong := statedunits.contradicted(called, plain(cell).split("_"), columns):
        column, unit = wrong
        raise MeasurementError(
            f"{show(name)} is {show(cell)}, and {show(column)} is in {unit}: name each column after its own unit"
        )


def _factor(name: str, column: str) -> float:
    return 1.0 if name == column else ALIASES.get(usual_name(name), ("", 1.0))[1]


def _check_several(name: str, called: str, cell: str, columns: Collection[str]) -> None:
    """Raise MeasurementError if a number above 1 is one of GPUs, slices or batches, of which a row is that of one."""
    words = {*called.split("_")}
    if words & _OF_GPUS or _ONE_OF_GPUS.fullmatch(called):
        raise MeasurementError(f"{show(name)} is {show(cell)}: leave out what ran on several GPUs")
    if _ACCUMULATED.fullmatch(called) and "throughput_per_s" not in columns:
        raise MeasurementError(
            f"{show(name)} is {show(cell)}: state the seconds of one of its batches, or throughput_per_s"
        )
    if "max" not in words and (words & _COPIES or (words & _COPY and words & _COUNTING)):
        raise MeasurementError(
            f"{show(name)} is {show(cell)}: if these are processes on one slice, call that column procs; if they "
            "are slices, state the figures of one, without that column"
        )


def _check_names(row: Mapping[str, str], names: Mapping[str, str], cells: dict[str, str]) -> None:
    """Raise MeasurementError if a column that is read by its name is that of another kind; drop requests per second
    beside another speed.
    """
    for name, text in row.items():
        column, called = names[name], plain(name)
        if not text.strip() or column not in COLUMNS or name == column:
            continue
        if "train" in called.split("_") and not cells.get("kind"):
            raise MeasurementError(f"{show(name)} is that of a training: add the column kind, with train there")
        if called in _OF_REQUESTS and cells.get("kind") != SERVE:
            if column == "batch" or not cells.get("latency_s"):
                raise MeasurementError(
                    f"{show(name)} counts requests: of a server, add the column kind, with serve there; else state "
                    f"{'the items of one in the column batch' if column == 'batch' else 'items per second'}"
                )
            cells[column] = ""


def _check_alone(row: Mapping[str, str], names: Mapping[str, str], batch: str) -> None:
    """Raise MeasurementError if a column that is not read says that the time of a row is not that of a batch alone."""
    for name, text in row.items():
        cell, called = text.strip(), plain(name)
        counted = _OF_GPU.fullmatch(cell)
        if names[name] in COLUMNS or counted is None or int(counted[1]) < 2:
            continue
        if _CONCURRENT.fullmatch(called):
            raise MeasurementError(
                f"{show(name)} is {show(cell)}: latency_s is the time of a batch alone, without the wait for others: "
                "leave it empty and state throughput_per_s, or if these are processes, call that column procs"
            )
        if _WHOLE_BATCH.fullmatch(called) and counted[1] != batch:
            raise MeasurementError(
                f"{show(name)} is {show(cell)}, and batch {show(batch)}: state the seconds of one of its batches, or "
                "throughput_per_s"
            )


def _check_whole(name: str, called: str, cell: str) -> None:
    """Raise MeasurementError if a cell of a table without a profile says that a row is one of a slice."""
    if _says_slice(called, cell):
        raise MeasurementError(f"{show(name)} has the slice {show(cell)}: call that column profile")
    if _UUID.fullmatch(cell):
        raise MeasurementError(f"{show(name)} is that of a slice: add a column profile")


def _check_inference(name: str, called: str, cell: str) -> None:
    """Raise MeasurementError if a cell of a table without a kind says that a row is one of training."""
    if _TRAINING.fullmatch(cell) and not {*called.split("_")} & _OF_DATA:
        raise MeasurementError(f"{show(name)} has {show(cell)}: call that column kind")
    yes = cell.lower() in _YES and _IS_TRAINING.fullmatch(called)
    if yes or (cell.lower() not in _NO_SLICE and _OF_TRAINING.fullmatch(called)):
        raise MeasurementError(f"{show(name)} is that of a training: add the column kind, with train there")


def _says_slice(called: str, cell: str) -> bool:
    if SLICE.fullmatch(cell):
        return True
    words = {*called.split("_")}
    if called in _OF_SLICES or "mig" in words:
        return cell.lower() not in _NO_SLICE
    if words & (_OF_INSTANCES | _OF_PARTS) and _QUARTER.fullmatch(cell):
        return True
    if words & _OF_PARTS and words <= _OF_PARTS | _OF_COMPUTE and _PART.fullmatch(cell):
        return True
    return bool(_BARE.fullmatch(cell) and not words & _OF_MEMORY)


def _with_slice(cells: dict[str, str], stated: str) -> dict[str, str]:
    """Return the cells with the slice in the GPU's name as the profile; `stated`: the cell of the profile.

    CUDA appends it to the name of the GPU inside a slice: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    """
    match = SLICE.search(cells.get("gpu", ""))
    if match is None:
        return cells
    gpu = (cells["gpu"][: match.start()] + cells["gpu"][match.end() :]).strip()
    profile = _cell("profile", "profile", match[1], ".")
    if not gpu:
        raise MeasurementError(
            "gpu names only a slice, not the GPU: write the GPU there (NVIDIA H100 80GB HBM3), and "
            f"{profile} in profile"
        )
    if stated and _is_same_profile(cells["profile"], profile) is False:
        raise MeasurementError(
            f"gpu names the slice {profile}, and profile is {show(stated)}: correct one, or leave profile empty"
        )
    return {**cells, "gpu": gpu, "profile": cells.get("profile") or profile}


def _is_same_profile(stated: str, profile: str) -> bool | None:
    """Return whether two names are those of one profile; None if one is no profile, which has an error of its own."""
    try:
        return bool(stated) and Profile.parse(stated) == Profile.parse(profile)
    except ProfileError:
        return None


def _cell(name: str, column: str, text: str, decimal: str) -> str:
    if column == "profile":
        match = _PROFILE.fullmatch(text.lower())
        # a column that is called `mig` may say whether it is on
        return (
            ""
            if text.lower() in (_WHOLE if name == column else _NO_SLICE)
            else f"{match[1]}g.{match[2]}gb{match[3]}"
            if match
            else text
        )
    if column in _TEXTS:
        return _word(column, text)
    if says_oom(text):
        return ""
    if column == "input_size":
        if sides := _SIDES.fullmatch(text.lower()) or _SHAPE.fullmatch(text):
            return str(max(map(int, filter(None, sides.groups()))))
        if sized := _WITH_UNIT.fullmatch(text.lower()):
            return sized[1]
    number = _number(name, _SCATTER.sub("", text), decimal)
    factor = _factor(name, column)
    try:
        return number if factor == 1.0 else f"{float(number) * factor:.12g}"
    except ValueError:
        return number


def says_oom(text: str) -> bool:
    """Return whether a cell says that memory ran out."""
    return bool(_NOT_RUN.match(text)) or reports_oom(text)


def _word(column: str, text: str) -> str:
    """Return a cell of a column of text with the usual word for what it says."""
    lowered = text.lower()
    if column == "kind":
        return "train" if _TRAINING.fullmatch(text) else _KINDS.get(lowered, text)
    if column == "precision":
        word = lowered.removeprefix("torch.").replace("_", "-")
        return _PRECISIONS.get(word, word)
    if column == "engine":
        return _ENGINES.get("".join(re.findall("[a-z]+", _RELEASE.sub("", lowered))), text)
    return text


def _number(name: str, text: str, decimal: str) -> str:
    """Return a number with a decimal dot, if it has any, and without separators of thousands."""
    mark, certain = _mark(text)
    if not mark or (certain and mark == "," and decimal == "."):
        return text
    other = "." if mark == "," else ","
    if not certain and (decimal == CONTRADICTORY or (not decimal and mark == ",")):
        readings = f"{text.replace(mark, '')} or {text.replace(mark, '.')}"
        raise MeasurementError(f"{show(name)} {text} may be {readings}: write it without a {_NAMES_OF_MARKS[mark]}")
    if not certain and decimal == other:
        mark, other = other, mark
    return text.replace(other, "").replace(mark, ".")
