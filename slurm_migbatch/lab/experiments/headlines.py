"""Compare the papers' main claims with our experiments on the same kind of workload.

A headline is beaten, not beaten or cannot be judged; the result of an experiment decides which. None
of them is a reproduction: the papers' traces, models and hardware are not public.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

Result = Mapping[str, Any]
Claim = tuple[str, float, float]
"""A quantity, our figure, and the paper's; more is better in both."""


@dataclass(frozen=True)
class Headline:
    """A paper's claim and our figure.

    Attributes:
        beaten: whether ours is at least as good in every quantity of the claim; None if it cannot be judged.
    """

    claim: str
    ours: str
    beaten: bool | None

    def line(self) -> str:
        """Return one line of text."""
        verdict = {True: "beaten", False: "not beaten", None: "cannot be judged"}[self.beaten]
        return f"{verdict}: {self.claim}; ours: {self.ours}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return asdict(self)


def _judged(claim: str, claims: list[Claim]) -> Headline:
    measured = "; ".join(f"{quantity} {value:.3g} (theirs {published:g})" for quantity, value, published in claims)
    return Headline(claim, measured, all(value >= published for _, value, published in claims))


def instances(result: Result) -> Headline:
    """Judge the GPUs saved against MIG off, on ParvaGPU's scenarios."""
    rows = {row["name"]: row for row in result["rows"]}
    programme, mig_off = rows["integer programme, measured figures"], rows["MIG off, a GPU for each model"]
    saved = 1 - programme["total"] / mig_off["total"]
    mean = statistics.fmean(
        1 - gpus / without for gpus, without in zip(programme["gpus"], mig_off["gpus"], strict=True)
    )
    claims = [("saved in all", 100 * saved, 50.0), ("mean of scenarios", 100 * mean, 50.0)]
    return _judged("ElasticBatch, 50 % fewer GPU instances than with MIG off", claims)


def fragmentation(result: Result) -> Headline:
    """Judge accepted jobs over first fit at heavy load, by migbatchd."""
    claims = [
        (f"{name}, load {load['load']:g}", 100 * (load["ways"]["planner"]["over_first_fit"]["jobs"][0] - 1), 10.0)
        for name, population in result["populations"].items()
        for load in population["loads"]
        if not load["queued"]
    ]
    return _judged("fragmentation-aware placing (arXiv 2511.18906), 10 % more accepted work at heavy load", claims)


def dispatch(result: Result) -> Headline:
    """Compare migbatchd with static layouts: PARIS and ELSA name no ratio that could be found."""
    sentences = [
        f"load {row['load']:g}: mean JCT {row['ways']['migbatchd']['over_equal'][0]:.2f} of the best equal slices', "
        f"{row['ways']['migbatchd']['over_static'][0]:.2f} of the best static cut's"
        for row in result["results"]
    ]
    return Headline("PARIS and ELSA, whose ratios are not public", "; ".join(sentences), None)


def pipelines(result: Result) -> Headline:
    """Compare migbatchd with splits of the deadline by users: ESG is measured against other schedulers."""
    sentences = []
    for row in result["results"]:
        ours, other = row["ways"]["migbatchd"], row["ways"][row["cheaper"]]
        sentences.append(
            f"{row['scenario']}: {ours['kept']:.1%} kept of {other['kept']:.1%} by the {row['cheaper']}, "
            f"at {ours['over_cheaper'][0]:.2f} of its slice-seconds"
        )
    claim = "ESG, 61 to 80 % more limits kept at 47 to 187 % less cost than other serverless schedulers, not run here"
    return Headline(claim, "; ".join(sentences), None)


def sharing(result: Result) -> Headline:
    """Judge the mean gain over sharing always, over all cells, in Slurm's order and the shortest first."""
    claims = [
        (
            f"{order}, mean over FFS",
            100 * (1 - statistics.fmean(cell["over"][f"{order}, pairs over FFS"][0] for cell in result["cells"])),
            17.0,
        )
        for order in ("FIFO", "SJF")
    ]
    return _judged("SJF-BSBF, up to 17 % less completion time than SJF-FFS on large traces", claims)


def placement(result: Result) -> Headline:
    """Judge accepted jobs over first fit at heavy load."""
    claims = [
        (f"{name}, load {load['load']:g}", 100 * row["gain_jobs"][0], 10.0)
        for name, population in result["populations"].items()
        for load in population["loads"]
        if load["load"] == 1.5
        for row in load["rules"]
        if row["rule"] == "least loss"
    ]
    return _judged("fragmentation-aware placing (arXiv 2511.18906), 10 % more accepted work at heavy load", claims)


def paris_elsa(result: Result) -> Headline:
    """Compare ours with the reconstruction of PARIS and ELSA, which name no ratio that could be found."""
    sentences = []
    for entry in result["results"]:
        means = entry["mean_over_best_homogeneous"]
        ratio = means["ours"] / means["PARIS, ELSA"] if means["PARIS, ELSA"] else float("inf")
        sentences.append(f"variance {entry['variance']:g}: {ratio:.2f} times their reconstruction's rate")
    return Headline("PARIS and ELSA, whose ratios are not public", "; ".join(sentences), None)


def dstack(result: Result) -> Headline:
    """Judge the share of the ideal's throughput, and utilisation and throughput over temporal sharing."""
    claims: list[Claim] = []
    for entry in result["results"]:
        overall, label = entry["all"], f"batches {entry['batches']}:"
        claims += [
            (f"{label} of the ideal", overall["load"]["ours"][0], 0.9),
            (f"{label} utilisation over temporal sharing", overall["utilisation_over_temporal"][0], 1.6),
            (f"{label} throughput over temporal sharing", overall["items_over_temporal"][0], 4.0),
        ]
    return _judged("D-STACK, 0.9 of an ideal scheduler, up to 1.6 x utilisation and 4 x throughput", claims)


def lending(result: Result) -> Headline:
    """Judge the completion time saved against training on its own half."""
    claims = [(entry["load"], 100 * (1 - entry["ways"]["ours"]["jct_ratio"][0]), 38.0) for entry in result["results"]]
    return _judged("DeepBoot, 38 % less completion time in simulation than without idle GPUs of inference", claims)


HEADLINES: Final[Mapping[str, Callable[[Result], Headline]]] = {
    "instances": instances,
    "fragmentation": fragmentation,
    "dispatch": dispatch,
    "pipelines": pipelines,
    "sharing": sharing,
    "placement": placement,
    "paris-elsa": paris_elsa,
    "dstack": dstack,
    "deepboot": lending,
    "lending": lending,
}
"""Experiment -> its headline; the others have none."""
