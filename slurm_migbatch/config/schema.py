"""What may stand in migbatch.toml: sections, keys, defaults, meaning and bounds, in one place.

The reader checks files against these dataclasses and the writer prints the commented default file from them,
so that documentation, defaults and validation cannot drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_migbatch.config.age import LEAST_AGE_S, AgeError, parse_age
from slurm_migbatch.config.hours import Hours, HoursError
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm.restaddress import RestAddress

#: A check returns what is wrong with a value as the end of a sentence ("must be ..."), or None.
Check = Callable[[Any], str | None]


def key(default: Any, doc: str, check: Check | None = None) -> Any:
    """Declare a configuration key: its default, what it means (shown in the default file) and its bounds."""
    return field(default=default, metadata={"doc": doc, "check": check})


def required(doc: str, check: Check | None = None) -> Any:
    """Declare a key without a default, for tables that exist only where somebody writes them."""
    return field(metadata={"doc": doc, "check": check})


def table(doc: str, check: Check | None = None) -> Any:
    """Declare a table of whole numbers with the site's own words as keys, empty by default; `check` gets each entry."""
    return field(default_factory=dict, metadata={"doc": doc, "check": check})


def between(low: float, high: float) -> Check:
    """Accept numbers from low to high, both included."""

    def check(value: float) -> str | None:
        return None if low <= value <= high else f"must be between {low:g} and {high:g}"

    return check


def one_of(*choices: str) -> Check:
    """Accept one of a few words."""

    def check(value: str) -> str | None:
        return None if value in choices else f"must be one of {', '.join(repr(c) for c in choices)}"

    return check


def absolute(value: str) -> str | None:
    """Accept an absolute path, since services have no useful working directory."""
    return None if value.startswith("/") else "must be an absolute path"


def absolute_or_empty(value: str) -> str | None:
    """Accept an absolute path, or empty for 'not set'."""
    return None if not value else absolute(value)


def program_or_empty(value: str) -> str | None:
    """Accept the path of a program that a shell takes as it is, or empty."""
    if not value or re.fullmatch(r"/[A-Za-z0-9._/-]+", value):
        return None
    return "must be an absolute path of letters, digits and . _ / -"


def rest_address(value: str) -> str | None:
    """Accept where slurmrestd listens."""
    try:
        RestAddress.parse(value)
    except ValueError:
        return "must be unix:/PATH, http://HOST:PORT or https://HOST:PORT"
    return None


def database_url(value: str) -> str | None:
    """Accept an SQLAlchemy URL of one of the databases that the store supports."""
    if re.match(r"(sqlite|mysql|mariadb|postgresql)(\+[a-z0-9_]+)?://", value):
        return None
    return "must be a database URL such as 'sqlite:////var/lib/migbatch/migbatch.db' or 'mysql+pymysql://user@host/db'"


def name(value: str) -> str | None:
    """Accept a word that may stand in Slurm's configuration."""
    return None if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value) else "must be a plain name (letters, digits, _ . -)"


def names(values: tuple[str, ...]) -> str | None:
    """Accept several such words."""
    bad = [v for v in values if name(v)]
    return f"must hold plain names, which {bad[0]!r} is not" if bad else None


def model_names(values: tuple[str, ...]) -> str | None:
    """Accept names of models, such as org/model-7b."""
    bad = [v for v in values if not re.fullmatch(r"[A-Za-z0-9_.+/-]{1,128}", v)]
    return f"must hold names of letters, digits and _ . + / -, which {bad[0]!r} is not" if bad else None


def profile_or_empty(value: str) -> str | None:
    """Accept a MIG profile, or empty."""
    return None if not value else profiles((value,))


def profiles(values: tuple[str, ...]) -> str | None:
    """Accept MIG profiles as nvidia-smi spells them."""
    for value in values:
        try:
            Profile.parse(value)
        except ProfileError as error:
            return f"must hold MIG profiles such as '1g.10gb' ({error})"
    return None


def hours(values: tuple[str, ...]) -> str | None:
    """Accept hours of the day, on some days of the week."""
    for value in values:
        try:
            Hours.parse(value)
        except HoursError as error:
            return f"must hold hours such as '08:00-18:00' or 'Mon-Fri 08:00-18:00' ({error})"
    return None


def age(value: str) -> str | None:
    """Accept how old something may become: a length of time that no reader of the record looks further back than."""
    try:
        seconds = parse_age(value)
    except AgeError as error:
        return f"must be a length of time such as '400d', '60w', '3y', or 'forever' ({error})"
    return None if seconds >= LEAST_AGE_S else f"must be at least '{LEAST_AGE_S // 86400:g}d'"


def share_of(entry: Mapping[str, int]) -> str | None:
    """Accept how much one account may have."""
    for account, value in entry.items():
        if name(account):
            return "must be the plain name of an account (letters, digits, _ . -)"
        if not 0 <= value <= 10**6:
            return "must be between 0 and 1000000"
    return None


@dataclass(frozen=True)
class ClusterConfig:
    """Which part of the Slurm cluster migbatch looks after, and how to talk to Slurm."""

    slurm_bin: str = key("", "Directory of scontrol, squeue, scancel ...; empty: found on PATH.", absolute_or_empty)
    slurm_conf: str = key("", "slurm.conf for those commands (SLURM_CONF); empty: Slurm's own rule.", absolute_or_empty)
    backend: str = key(
        "cli",
        "What lists the queue: 'cli' (squeue), 'pyslurm' (needs Slurm 25.11 with its headers, as Ubuntu 26.04 has "
        "them: pip install 'slurm-migbatch[pyslurm-25-11]'), 'slurmrestd' (the REST API, of which changes are asked "
        "too), or 'auto' (pyslurm where it can be used). All show the same; Slurm's commands do what the others "
        "cannot.",
        one_of("cli", "pyslurm", "slurmrestd", "auto"),
    )
    pyslurm_python: str = key(
        "",
        "The Python that has pyslurm, such as the system's where migbatch has one of its own; empty: migbatchd's.",
        absolute_or_empty,
    )
    slurmrestd: str = key(
        "unix:/run/slurmrestd.socket",
        "Where backend 'slurmrestd' finds it: unix:/PATH, http://HOST:PORT or https://HOST:PORT.",
        rest_address,
    )
    slurmrestd_token: str = key(
        "",
        "File with a token of slurm_user's for it (`scontrol token`), for migbatchd's user alone to read; empty: "
        "slurmrestd has to know who is at the other end of its socket (rest_auth/local).",
        absolute_or_empty,
    )
    slurm_user: str = key("slurm", "SlurmUser: besides root, the only user whose nodes' messages are believed.", name)
    partitions: tuple[str, ...] = key(
        (), "Partitions whose --gpus and --gres=gpu requests become MIG slices; empty: every one with MIG nodes.", names
    )
    catalog_nodes: str = key(
        "no-mig-slice-free", "The DOWN nodes that list every profile, so that jobs pend where nothing is offered yet."
    )
    poll_s: float = key(
        1.0, "Seconds between two queries of Slurm when nothing happens; each is followed by a plan.", between(0.05, 60)
    )
    timeout_s: float = key(20.0, "Seconds after which a Slurm command counts as failed.", between(1, 300))


@dataclass(frozen=True)
class SubmitConfig:
    """The submit filter behind job_submit.lua."""

    socket: str = key(
        "/run/migbatch/submit.sock",
        "Unix socket for questions of users; slurmctld has one of its own beside it.",
        absolute,
    )
    deadline_ms: int = key(
        100, "Milliseconds after which slurmctld stops waiting and uses the compiled table.", between(5, 2000)
    )
    table: str = key(
        "/var/lib/migbatch/table.lua",
        "Compiled answers for when the service is down; rewritten when facts change.",
        absolute,
    )
    catalog: str = key(
        "/var/lib/migbatch/catalog.json",
        "What the site has, as last known; for `migbatch explain` and the first seconds after a start.",
        absolute,
    )
    default_profile: str = key(
        "", "Profile for auto requests of which nothing is known; empty: the smallest that exists.", profile_or_empty
    )
    describe: str = key(
        "",
        "The migbatch on submit hosts by which cli_filter.lua turns model=/path into hints, as the user; empty: never.",
        program_or_empty,
    )
    allow_extra: bool = key(False, "Read hints from --extra too (Slurm 23.11 and later; see SchedulerParameters).")


@dataclass(frozen=True)
class SupplyConfig:
    """What the free space of the GPUs is offered as."""

    enabled: bool = key(True, "Offer free space by `scontrol update Gres=`; false: slurm.conf's counts stand.")
    preference: tuple[str, ...] = key(
        (),
        "What idle space is offered as when nobody waits: tried in this order, again and again, until nothing fits; "
        "empty: one slice of each size (an H100 becomes 4g + 2g + 1g).",
        profiles,
    )
    ack_wait_s: float = key(
        0.5,
        "Seconds that one round waits for nodes to confirm new plans; the next rounds see the rest.",
        between(0, 10),
    )
    node_silence_s: float = key(
        90.0, "Seconds without a word from a node after which its offer is left as it is.", between(1, 3600)
    )


@dataclass(frozen=True)
class MovesConfig:
    """Trainings with signal= on slices of their own make way for larger slices, and start again elsewhere."""

    enabled: bool = key(
        True,
        "Requeue a training after a checkpoint where that lets a waiting job start and the training fits elsewhere; "
        "only those with role=train and signal=, never inference.",
    )
    after_s: float = key(
        5.0, "Seconds that a job has waited for a reserved place before another is moved for it.", between(0, 86400)
    )
    gain_s: float = key(
        180.0, "A job starts at least so many seconds sooner by it, as far as time limits tell.", between(0, 7 * 86400)
    )
    rest_s: float = key(
        300.0,
        "Seconds after its start before which no training is moved; twice as many for each restart that it had.",
        between(0, 7 * 86400),
    )
    grace_s: float = key(60.0, "Seconds that a training has for its checkpoint.", between(0, 3600))


@dataclass(frozen=True)
class LendingConfig:
    """Idle inference slices lent to training jobs (role=train, no profile named) of some partitions."""

    enabled: bool = key(
        False, "Lend. Training jobs of these partitions then wait with the GRES mig:loan:1 until a slice is idle."
    )
    dry_run: bool = key(
        False, "Only record what would be done (`migbatch loans`); no job is released, told to stop or changed."
    )
    partitions: tuple[str, ...] = key(
        (),
        "Partitions whose elastic training jobs may be lent slices. Slurm itself must be allowed to requeue their jobs "
        "(PreemptMode=REQUEUE, a lower PriorityTier): that frees slices while migbatchd is away.",
        names,
    )
    training_only: tuple[str, ...] = key(
        (),
        "Those of them in which nothing but elastic training runs. Nodes in no other partition are used first, and "
        "nothing is kept free there for inference.",
        names,
    )
    min_idle_s: float = key(
        0.0, "Seconds for which nothing must have been freed on a GPU before it is lent from.", between(0, 7 * 86400)
    )
    rest_s: float = key(
        0.0, "Seconds for which a GPU is not lent from after a loan was reclaimed there.", between(0, 7 * 86400)
    )
    horizon_s: float = key(
        60.0,
        "Seconds for which inference must be expected not to need what is lent.",
        between(1, 7 * 86400),
    )
    sure: float = key(
        0.8,
        "Probability with which what is lent is not needed during those seconds: the higher, the more is kept free for "
        "inference and the fewer loans are reclaimed.",
        between(0.01, 0.9999),
    )
    payback_s: float = key(
        600.0,
        "Seconds within which a larger slice must have earned the restart back that it costs.",
        between(1, 7 * 86400),
    )
    forecast_days: int = key(14, "Days of history that the forecast of inference looks at.", between(1, 366))
    day_s: float = key(
        86400.0, "Length of such a day in seconds; less only where a day is replayed in less time.", between(60, 86400)
    )
    grace_s: float = key(
        60.0, "Seconds that a job with signal= has for its checkpoint when its slice is needed.", between(0, 3600)
    )
    start_s: float = key(
        60.0, "Seconds after which a released job that has not started is put back to waiting.", between(5, 3600)
    )
    reclaim: bool = key(True, "Call loans back when inference needs room; false: they stay until they end.")
    most_releases: int = key(8, "Most jobs released in one round.", between(1, 1000))
    max_restarts: int = key(
        3,
        "A job that was stopped so often for the sake of a larger slice is stopped for one again only after it has run "
        "for an hour; a job that was stopped so often at all is stopped for inference only where no other loan would "
        "do.",
        between(0, 1000),
    )
    quota: Mapping[str, int] = table(
        "Most compute slices lent at once, by account; accounts that are not named have no bound.", share_of
    )
    blackout: tuple[str, ...] = key(
        (),
        "Hours in which nothing is lent, in local time: '08:00-18:00', 'Mon-Fri 22:00-06:00' (until next morning), "
        "'Sat,Sun 00:00-24:00'.",
        hours,
    )
    share: bool = key(
        False,
        "Let two training jobs of one user share a slice where both gain. Only jobs that say how much GPU memory they "
        "need (mem=) do; with Slurm up to 23.02 none.",
    )
    pairs: str = key(
        "",
        "File with what models cost one another on one slice: CSV of app1,app2,slowdown1,slowdown2 (how many times "
        "longer app1 takes beside app2, and app2 beside app1). Other pairs are measured while they run, by what jobs "
        "report; before the first of them a slowdown of 1.5 is assumed.",
        absolute_or_empty,
    )
    restart_s: float = key(
        30.0, "Seconds that a restart costs a job of which no restart has been measured.", between(0, 86400)
    )
    checkpoint_s: float = key(
        10.0, "Seconds that a checkpoint takes a job that has not reported any.", between(0, 86400)
    )


@dataclass(frozen=True)
class DispatchConfig:
    """Pending jobs follow supply: `auto` jobs to another acceptable profile, elastic arrays by their throttle."""

    enabled: bool = key(
        True,
        "Give a pending mig:auto job another profile that keeps its promise where that starts it sooner; never a job "
        "whose user named a profile.",
    )
    arrays: bool = key(
        True,
        "Let the number of running tasks of arrays follow what is needed: by their deadline where they have deadline= "
        "and items=, by their load where they have role=serve and rate=.",
    )
    dry_run: bool = key(False, "Only record what would be done (`migacct`, the log); no job is changed.")
    every_s: float = key(
        5.0, "Least seconds between two rounds that may re-type jobs or set throttles.", between(0.1, 3600)
    )
    hold_s: float = key(60.0, "Seconds for which a job keeps the profile that it was given.", between(0, 86400))


@dataclass(frozen=True)
class LearningConfig:
    """What finished runs and imported measurements teach the predictor."""

    enabled: bool = key(True, "Refit in the background; false: predictions stay as they are (`migbatch model refit`).")
    models: str = key(
        "/var/lib/migbatch/models",
        "Directory of learned models, written by migbatchd and `migbatch model`; nobody else may write there.",
        absolute,
    )
    every_s: float = key(300.0, "Seconds between two searches for new runs to learn from.", between(0.2, 7 * 86400))
    min_new: int = key(
        20, "New runs with figures that make a refit worth while; an import is one at once.", between(1, 10**6)
    )
    runs: int = key(10_000, "Newest runs that are learned from.", between(10, 10**6))
    keep: int = key(5, "Versions that are kept to go back to.", between(2, 1000))
    confidence: float = key(
        0.9, "Probability with which a predicted limit is to hold: higher means larger slices.", between(0.5, 0.99)
    )
    tolerance: float = key(
        0.05,
        "How much further off than the current model a new one may be, on new figures held out (0.05: by a twentieth), "
        "before it is refused.",
        between(0, 10),
    )
    limit_s: float = key(1800.0, "Seconds after which a refit is given up.", between(1, 7 * 86400))


@dataclass(frozen=True)
class RecurringConfig:
    """Jobs that say nothing: what they get follows what earlier runs of the same job showed."""

    enabled: bool = key(True, "Give mig:auto jobs without hints what their own runs used, once there are enough.")
    runs: int = key(3, "Completed runs whose memory was seen before their figures are used.", between(2, 20))
    slowdown: float = key(
        1.1,
        "How many times longer a run may be expected to take than on the smallest slice on which runs completed, by "
        "the share of SMs and memory bandwidth in use there; where the agents sample it.",
        between(1, 100),
    )
    retry: bool = key(
        True, "Run jobs and array tasks with the hint retry=oom once more, on a larger slice, if theirs was too small."
    )
    advise: bool = key(False, "Tell users whose whole-GPU jobs ran in what a slice has; the jobs are not changed.")


@dataclass(frozen=True)
class StoreConfig:
    """The record of decisions, runs and slices."""

    url: str = key(
        "sqlite:////var/lib/migbatch/migbatch.db",
        "Database; SQLite on a local disk, or MariaDB/PostgreSQL where the controller is highly available.",
        database_url,
    )
    keep: str = key(
        "400d",
        "How long ended runs, with decisions, events and whatever else is about them, are kept: '400d' (for a year's "
        "report, and a month to write it), '60w', '3y'; '0' or 'forever': for good, as slurmdbd does by default.",
        age,
    )

    @property
    def keep_s(self) -> float:
        """The same in seconds; infinite where nothing is removed."""
        return parse_age(self.keep)


@dataclass(frozen=True)
class NodeApiConfig:
    """The HTTP service to which nodes send events and from which they pull plans."""

    listen: str = key(
        "",
        "Address to listen on, where the nodes are; empty: those of slurm.conf's SlurmctldHost and SlurmctldAddr that "
        "this host has, and 127.0.0.1; '0.0.0.0' or '::': every interface.",
    )
    port: int = key(6830, "Port; nodes name it in node.conf (Controller=http://host:port).", between(0, 65535))
    auth: str = key("munge", "How both sides prove who they are: 'munge' or 'token'.", one_of("munge", "token"))
    munge_socket: str = key("", "munged's socket; empty: munge's default.", absolute_or_empty)
    token_file: str = key(
        "/etc/migbatch/token",
        "Shared secret for auth = 'token'; owned by root, mode 0600. Nodes hold their own keys (`migbatch node key`).",
        absolute,
    )
    metrics_token_file: str = key(
        "",
        "File with a token, 32 bytes at least, for reading /metrics from other hosts (Authorization: Bearer); owned by "
        "migbatchd's user, mode 0600. Empty: only this host reads them, at a loopback address.",
        absolute_or_empty,
    )
    check_addresses: bool = key(
        True,
        "With auth = 'munge': believe a node only from an address that Slurm has for it (NodeAddr, NodeHostname): "
        "the root of any node can make munge credentials in the name of another. false: where nodes come through a "
        "proxy. With auth = 'token' a node is known by its key (`migbatch node key`).",
    )
    max_body_kb: int = key(4096, "Largest request body that is read, in KiB.", between(16, 65536))
    max_connections: int = key(
        4096,
        "Most connections at once; each node needs two. LimitNOFILE of migbatchd bounds it too.",
        between(16, 10**6),
    )


@dataclass(frozen=True)
class QueryConfig:
    """The service that answers users on any host: migacct, migbatch why, show, usage and the like; by munge only."""

    enabled: bool = key(True, "Answer users over the network; false: only who may read the database can ask.")
    listen: str = key("", "Address to listen on, where login nodes are; empty: chosen as for [node_api].")
    port: int = key(6831, "Port; login nodes name it in login.conf (Servers=http://host:port).", between(0, 65535))
    workers: int = key(2, "Questions that are worked on at once, each by a process of its own.", between(1, 64))
    question_s: float = key(20.0, "Seconds after which a question is given up.", between(1, 600))
    answer_mb: int = key(16, "Megabytes that an answer may have.", between(1, 256))
    max_connections: int = key(512, "Most connections at once.", between(16, 10**6))


@dataclass(frozen=True)
class ReportConfig:
    """The page of pictures that the process answering users serves to browsers, as `migbatch report` draws it."""

    page: bool = key(False, "Serve it; needs [query] enabled and the extra `report`.")
    listen: str = key("127.0.0.1", "Address to listen on; elsewhere than on loopback every page needs the token.")
    port: int = key(6832, "Port.", between(0, 65535))
    token_file: str = key(
        "",
        "File with a token, 32 bytes at least, for a page of all runs whatever PrivateData says (Authorization: "
        "Bearer, or as a password); owned by migbatchd's user, mode 0600. Empty: this host alone is shown what "
        "PrivateData shows to everybody.",
        absolute_or_empty,
    )
    days: int = key(30, "Days back that it shows where its address names no others.", between(1, 3660))


@dataclass(frozen=True)
class DaemonConfig:
    """The service itself."""

    run_dir: str = key("/run/migbatch", "Lock file and socket directory; made if missing.", absolute)
    log_level: str = key("info", "What is logged to stderr.", one_of("debug", "info", "warning", "error"))
    queue: int = key(
        20000, "Records that may wait for the database before nodes are asked to retry.", between(10, 10**7)
    )
    audit: bool = key(True, "Cancel jobs that hold more slices than Slurm allocated to them.")
    record_hours: float = key(
        12.0,
        "Hours for which snapshots and decisions are kept in run_dir/decisions for `migbatch replay`; 0: not at all.",
        between(0, 1000),
    )
    record_mb: float = key(64.0, "Megabytes that they may take, the oldest go first.", between(1, 10**6))

    @property
    def api_socket(self) -> str:
        """The unix socket on which commands of this host ask."""
        return f"{self.run_dir}/api.sock"


@dataclass(frozen=True)
class GpuConfig:
    """Speed of one model of GPU as a whole, by its short name ("h100-80gb"); 0 keeps the built-in figure."""

    tflops: float = key(0.0, "Dense 16-bit matrix rate, 10^12 operations per second.", between(0, 1e6))
    bandwidth_gbs: float = key(0.0, "Memory bandwidth, 10^9 bytes per second.", between(0, 1e6))
    sm_count: int = key(0, "SMs outside MIG.", between(0, 10000))
    types: tuple[str, ...] = key((), "Further names that users write in --gres=gpu:<type>.", names)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts about one of the site's own models, by the name that users write in model=..."""

    family: str = key("other", "Group of similar models.", name)
    params_m: float = required("Parameters, in millions.", between(1e-6, 1e9))
    gflops: float = required("10^9 operations for one item of size `reference`.", between(1e-9, 1e12))
    unit: str = key("tok", "What the input size counts: 'tok' or 'px' (side of a square).", one_of("tok", "px"))
    reference: int = required("Input size to which gflops and activation_mib belong.", between(1, 10**7))
    kernels: int = key(200, "Kernel launches in one forward pass.", between(1, 10**6))
    activation_mib: float = key(100.0, "Live activations of one item, in MiB.", between(1e-3, 1e7))
    weight_bytes: int = key(2, "Bytes per parameter as served.", between(1, 16))
    layers: int = key(0, "Attention layers; 0 where the work grows linearly.", between(0, 10**5))
    width: int = key(0, "Width of the attention layers.", between(0, 10**7))
    aliases: tuple[str, ...] = key((), "Other names of the model.", model_names)


@dataclass(frozen=True)
class Config:
    """The whole file; `gpus` and `models` hold a table for each name."""

    cluster: ClusterConfig = ClusterConfig()
    submit: SubmitConfig = SubmitConfig()
    supply: SupplyConfig = SupplyConfig()
    moves: MovesConfig = MovesConfig()
    dispatch: DispatchConfig = DispatchConfig()
    lending: LendingConfig = LendingConfig()
    learning: LearningConfig = LearningConfig()
    recurring: RecurringConfig = RecurringConfig()
    store: StoreConfig = StoreConfig()
    node_api: NodeApiConfig = NodeApiConfig()
    query: QueryConfig = QueryConfig()
    report: ReportConfig = ReportConfig()
    daemon: DaemonConfig = DaemonConfig()
    gpus: Mapping[str, GpuConfig] = field(default_factory=dict)
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    #: the file this came from, "" for defaults
    path: str = ""
