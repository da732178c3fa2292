"""Define migbatch.toml: sections, keys, defaults, meanings and bounds. Reader and writer of the file follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_migbatch.config.age import parse_age
from slurm_migbatch.config.keys import (
    absolute,
    absolute_or_empty,
    age,
    between,
    database_url,
    host_list,
    hours,
    key,
    model_names,
    name,
    names,
    one_of,
    profile_or_empty,
    profiles,
    program_or_empty,
    required,
    rest_address,
    share_of,
    socket_path,
    table,
)


@dataclass(frozen=True)
class ClusterConfig:
    """The part of the Slurm cluster that migbatch manages, and the interface to Slurm."""

    slurm_bin: str = key("", "Directory of scontrol, squeue, scancel ...; empty: found on PATH.", absolute_or_empty)
    slurm_conf: str = key("", "slurm.conf for these commands (SLURM_CONF); empty: Slurm's default.", absolute_or_empty)
    backend: str = key(
        "cli",
        "Source of the queue: 'cli' (squeue), 'pyslurm' (needs Slurm 25.11 with its headers, as in Ubuntu 26.04: pip "
        "install 'slurm-migbatch[pyslurm-25-11]'), 'slurmrestd' (the REST API, also used for changes), or 'auto' "
        "(pyslurm if usable). All show the same; Slurm's commands do what the others cannot.",
        one_of("cli", "pyslurm", "slurmrestd", "auto"),
    )
    pyslurm_python: str = key(
        "",
        "Python that has pyslurm, for example the system's if migbatchd runs in a virtual environment; empty: "
        "migbatchd's.",
        absolute_or_empty,
    )
    slurmrestd: str = key(
        "unix:/run/slurmrestd.socket",
        "Address of slurmrestd: unix:/PATH, http://HOST:PORT or https://HOST:PORT.",
        rest_address,
    )
    slurmrestd_token: str = key(
        "",
        "File with a token of slurm_user (`scontrol token`), readable only by migbatchd's user; empty: slurmrestd "
        "must authenticate the user of its socket itself (rest_auth/local).",
        absolute_or_empty,
    )
    slurm_user: str = key(
        "slurm", "SlurmUser: besides root, the only user whose messages are accepted from nodes.", name
    )
    partitions: tuple[str, ...] = key(
        (), "Partitions whose --gpus and --gres=gpu requests become MIG slices; empty: all with MIG nodes.", names
    )
    catalog_nodes: str = key(
        "no-mig-slice-free",
        "DOWN nodes that list every profile, so that jobs pend if nothing is offered yet.",
        host_list,
    )
    poll_s: float = key(
        1.0, "Seconds between two queries of Slurm without events; a plan follows each.", between(0.05, 60)
    )
    timeout_s: float = key(20.0, "Timeout of a Slurm command, in seconds.", between(1, 300))

    @property
    def commands(self) -> tuple[str | None, str | None, float]:
        """The arguments of a client of these commands: directory, slurm.conf and timeout."""
        return self.slurm_bin or None, self.slurm_conf or None, self.timeout_s


@dataclass(frozen=True)
class SubmitConfig:
    """The submit filter behind job_submit.lua."""

    socket: str = key(
        "/run/migbatch/submit.sock",
        "Unix socket for user queries; slurmctld has its own socket in the same directory.",
        socket_path,
    )
    deadline_ms: int = key(
        100, "Milliseconds after which slurmctld stops waiting and uses the compiled table.", between(5, 2000)
    )
    table: str = key(
        "/var/lib/migbatch/table.lua",
        "Compiled answers for when the service is down; rewritten when the site or the predictor changes.",
        absolute,
    )
    catalog: str = key(
        "/var/lib/migbatch/catalog.json",
        "Last known GPUs and partitions of the site; for `migbatch explain` and the first seconds after a start.",
        absolute,
    )
    default_profile: str = key(
        "", "Profile for auto requests about which nothing is known; empty: the smallest.", profile_or_empty
    )
    describe: str = key(
        "",
        "migbatch program on submit hosts with which cli_filter.lua converts model=/path into hints, as the user; "
        "empty: never.",
        program_or_empty,
    )
    allow_extra: bool = key(False, "Read hints from --extra too (Slurm 23.11 and later; see SchedulerParameters).")


@dataclass(frozen=True)
class SupplyConfig:
    """Profiles that free GPU space is offered as."""

    enabled: bool = key(True, "Offer free space by `scontrol update Gres=`; false: keep the counts of slurm.conf.")
    preference: tuple[str, ...] = key(
        (),
        "Profiles to offer idle space as when no job waits: tried repeatedly in this order until none fits; empty: "
        "by the requests of the last two weeks and the queue (with [dispatch] enabled), and as long as these are few "
        "one slice of each size (an H100 becomes 4g + 2g + 1g).",
        profiles,
    )
    ack_wait_s: float = key(
        0.5,
        "Seconds that a round waits for nodes to acknowledge new plans; later rounds handle the rest.",
        between(0, 10),
    )
    node_silence_s: float = key(
        90.0, "Seconds without a message from a node after which its offer is left unchanged.", between(1, 3600)
    )


@dataclass(frozen=True)
class MovesConfig:
    """Training jobs with signal= on slices of their own are moved for larger slices, and restart elsewhere."""

    enabled: bool = key(
        True,
        "Requeue a training job after a checkpoint if this lets a waiting job start and the training job fits "
        "elsewhere; only jobs with role=train and signal=, never inference.",
    )
    after_s: float = key(
        5.0,
        "Seconds that a job must have waited for its reservation before another job is moved for it.",
        between(0, 86400),
    )
    gain_s: float = key(
        180.0,
        "Minimum number of seconds by which the waiting job must start sooner, according to time limits.",
        between(0, 7 * 86400),
    )
    rest_s: float = key(
        300.0,
        "Seconds after its start during which a training job is not moved; doubled for each restart.",
        between(0, 7 * 86400),
    )
    grace_s: float = key(60.0, "Seconds that a training job has to write its checkpoint.", between(0, 3600))
    preempt: bool = key(
        False,
        "Preempt jobs for a waiting job that needs slices of another profile, where PreemptType of slurm.conf lets it "
        "preempt them; Slurm itself preempts only jobs with the same profile.",
    )


@dataclass(frozen=True)
class LendingConfig:
    """Idle inference slices lent to training jobs (role=train, no explicit profile) of some partitions."""

    enabled: bool = key(
        False,
        "Enable lending. Training jobs of these partitions then pend with the GRES mig:loan:1 until a slice is idle.",
    )
    dry_run: bool = key(
        False, "Only record what would be done (`migbatch loans`); no job is released, signalled or changed."
    )
    partitions: tuple[str, ...] = key(
        (),
        "Partitions whose elastic training jobs can be lent slices. Slurm itself must be able to requeue their jobs "
        "(PreemptMode=REQUEUE, a lower PriorityTier): this frees slices while migbatchd is down, of jobs that have run "
        "for PreemptExemptTime.",
        names,
    )
    training_only: tuple[str, ...] = key(
        (),
        "Those of them that run only elastic training jobs. Nodes that are in no other partition are used first, and "
        "nothing is kept free there for inference.",
        names,
    )
    min_idle_s: float = key(
        0.0, "Seconds without a released slice on a GPU before its slices are lent.", between(0, 7 * 86400)
    )
    rest_s: float = key(
        0.0, "Seconds for which a GPU is not lent from after a loan was reclaimed there.", between(0, 7 * 86400)
    )
    horizon_s: float = key(
        60.0,
        "Seconds for which inference must not be expected to need a lent slice. A job that would otherwise stay "
        "pending may be lent one that is at least its equal share of the slices that can be lent.",
        between(1, 7 * 86400),
    )
    sure: float = key(
        0.8,
        "Probability that a lent slice is not needed during horizon_s: higher values keep more free for inference and "
        "reclaim fewer loans.",
        between(0.01, 0.9999),
    )
    payback_s: float = key(
        600.0,
        "Seconds within which a larger slice must compensate for the restart that it costs.",
        between(1, 7 * 86400),
    )
    settle_s: float = key(
        150.0,
        "Seconds after its start for which a job is not restarted for another slice; twice as long with each restart, "
        "an hour at most.",
        between(0, 3600),
    )
    forecast_days: int = key(14, "Days of history used by the forecast of inference.", between(1, 366))
    day_s: float = key(
        86400.0, "Length of such a day in seconds; less only if a day is replayed in less time.", between(60, 86400)
    )
    grace_s: float = key(
        60.0, "Seconds that a job with signal= has to write its checkpoint when its slice is needed.", between(0, 3600)
    )
    start_s: float = key(
        60.0, "Seconds after which a released job that has not started is withdrawn.", between(5, 3600)
    )
    reclaim: bool = key(True, "Reclaim loans when inference needs slices; false: they last until the job ends.")
    most_releases: int = key(8, "Maximum number of jobs released in one round.", between(1, 1000))
    max_restarts: int = key(
        3,
        "Number of restarts for another slice after which a job is restarted for one only once an hour, and number of "
        "all restarts after which a job is reclaimed only if no other loan is enough.",
        between(0, 1000),
    )
    quota: Mapping[str, int] = table(
        "Maximum number of compute slices lent at once, by account; other accounts have no limit.", share_of
    )
    blackout: tuple[str, ...] = key(
        (),
        "Times at which nothing is lent, except to jobs stopped for another slice, in local time: '08:00-18:00', "
        "'Mon-Fri 22:00-06:00' (until the next morning), 'Sat,Sun 00:00-24:00'.",
        hours,
    )
    share: bool = key(
        False,
        "Let two training jobs of one user share a slice if both benefit. Only for jobs that give their GPU memory "
        "(mem=); with Slurm up to 23.02 for none.",
    )
    pairs: str = key(
        "",
        "CSV file of slowdowns on a shared slice: app1,app2,slowdown1,slowdown2 (how many times longer app1 takes "
        "beside app2, and app2 beside app1), and profile (without one: on all). Other pairs are measured at run time "
        "from job reports; until the first report their slowdown follows from the SM activity of both alone, or is "
        "1.5 where that is unknown.",
        absolute_or_empty,
    )
    restart_s: float = key(30.0, "Cost of a restart in seconds for a job without a measured one.", between(0, 86400))
    checkpoint_s: float = key(
        10.0, "Time to write a checkpoint in seconds for a job that has not reported one.", between(0, 86400)
    )


@dataclass(frozen=True)
class DispatchConfig:
    """Adjusting pending jobs to supply: `auto` jobs by another acceptable profile, elastic arrays by their throttle."""

    enabled: bool = key(
        True,
        "Give a pending mig:auto job another profile that meets its request if it then starts sooner, never a job "
        "with an explicit profile; adjust pipelines and arrays; offer free space by past requests. false: none of "
        "these.",
    )
    arrays: bool = key(
        True,
        "Adjust the number of running tasks of arrays: by deadline with deadline= and items=, by load with role=serve "
        "and rate=.",
    )
    dry_run: bool = key(False, "Only record what would be done (`migacct`, the log); no job is changed.")
    every_s: float = key(
        5.0, "Minimum number of seconds between two rounds that re-type jobs or set throttles.", between(0.1, 3600)
    )
    hold_s: float = key(60.0, "Seconds for which a re-typed job keeps its new profile.", between(0, 86400))


@dataclass(frozen=True)
class LearningConfig:
    """Learning of the predictor from finished runs and imported measurements."""

    enabled: bool = key(True, "Refit in the background; false: predictions do not change (`migbatch model refit`).")
    models: str = key(
        "/var/lib/migbatch/models",
        "Directory of learned models, written by migbatchd and `migbatch model`; must not be writable by others.",
        absolute,
    )
    every_s: float = key(300.0, "Seconds between two searches for new runs.", between(0.2, 7 * 86400))
    min_new: int = key(
        20, "New runs with figures that trigger a refit; an import triggers one immediately.", between(1, 10**6)
    )
    runs: int = key(10_000, "Number of newest runs used for learning.", between(10, 10**6))
    keep: int = key(5, "Number of versions kept for rollback.", between(2, 1000))
    confidence: float = key(
        0.9, "Probability with which a predicted limit must hold: higher means larger slices.", between(0.5, 0.99)
    )
    tolerance: float = key(
        0.05,
        "How much larger the error of a new model on new held-out figures may be than that of the current one (0.05: "
        "5 %) before it is rejected.",
        between(0, 10),
    )
    limit_s: float = key(1800.0, "Seconds after which a refit is aborted.", between(1, 7 * 86400))


@dataclass(frozen=True)
class RecurringConfig:
    """Jobs without hints: their slice follows earlier runs of the same job."""

    enabled: bool = key(True, "Give mig:auto jobs without hints what their earlier runs used, once there are enough.")
    runs: int = key(3, "Number of completed runs with measured memory before their figures are used.", between(2, 20))
    slowdown: float = key(
        1.1,
        "Maximum expected slowdown relative to the smallest slice on which runs completed, from the SM and memory "
        "bandwidth utilization there, if the agents sample it.",
        between(1, 100),
    )
    retry: bool = key(
        True,
        "Run jobs and array tasks with the hint retry=oom once more, on a larger slice, if they ran out of memory.",
    )
    advise: bool = key(
        False, "Tell users of whole-GPU jobs if a slice would have been enough; the jobs are not changed."
    )


@dataclass(frozen=True)
class StoreConfig:
    """The record of decisions, runs and slices."""

    url: str = key(
        "sqlite:////var/lib/migbatch/migbatch.db",
        "Database URL: SQLite on a local disk, or MariaDB/PostgreSQL for a highly available controller.",
        database_url,
    )
    keep: str = key(
        "400d",
        "How long ended runs are kept, with their decisions and events: '400d' (a year, and a month to write its "
        "report), '60w', '3y'; '0' or 'forever': never remove, as slurmdbd does by default.",
        age,
    )

    @property
    def keep_s(self) -> float:
        """The same in seconds; infinite if nothing is removed."""
        return parse_age(self.keep)


@dataclass(frozen=True)
class NodeApiConfig:
    """The HTTP service to which nodes send events and from which they pull plans."""

    listen: str = key(
        "",
        "Address to listen on for nodes; empty: this host's addresses among slurm.conf's SlurmctldHost and "
        "SlurmctldAddr, and 127.0.0.1; '0.0.0.0' or '::': every interface.",
    )
    port: int = key(6830, "Port; nodes name it in node.conf (Controller=http://host:port).", between(0, 65535))
    auth: str = key("munge", "Authentication of both sides: 'munge' or 'token'.", one_of("munge", "token"))
    munge_socket: str = key("", "munged's socket; empty: munge's default.", absolute_or_empty)
    token_file: str = key(
        "/etc/migbatch/token",
        "Shared secret for auth = 'token'; migbatchd's user's, mode 0600. Nodes hold own keys (`migbatch node key`).",
        absolute,
    )
    metrics_token_file: str = key(
        "",
        "File with a token, at least 32 bytes, for reading /metrics from other hosts (Authorization: Bearer); owned "
        "by migbatchd's user, mode 0600. Empty: only this host can read them, at a loopback address.",
        absolute_or_empty,
    )
    check_addresses: bool = key(
        True,
        "With auth = 'munge': accept messages of a node only from an address that Slurm has for it (NodeAddr, "
        "NodeHostname), because root of any node can create munge credentials for another. Set to false if nodes "
        "connect through a proxy. With auth = 'token' a node is identified by its key (`migbatch node key`).",
    )
    max_body_kb: int = key(4096, "Maximum size of a request body, in KiB.", between(16, 65536))
    max_connections: int = key(
        4096,
        "Maximum number of connections; each node needs two. LimitNOFILE of migbatchd limits it too.",
        between(16, 10**6),
    )


@dataclass(frozen=True)
class QueryConfig:
    """The service that answers user queries on any host: migacct, migbatch why, show, usage and others; munge only."""

    enabled: bool = key(
        True, "Answer users over the network; false: only users who can read the database can query it."
    )
    listen: str = key("", "Address to listen on for login nodes; empty: as for [node_api].")
    port: int = key(6831, "Port; login nodes name it in login.conf (Servers=http://host:port).", between(0, 65535))
    workers: int = key(2, "Number of concurrent queries, each in its own process.", between(1, 64))
    question_s: float = key(20.0, "Timeout of a query, in seconds.", between(1, 600))
    answer_mb: int = key(16, "Maximum size of an answer, in megabytes.", between(1, 256))
    max_connections: int = key(512, "Maximum number of connections.", between(16, 10**6))


@dataclass(frozen=True)
class ReportConfig:
    """The page of charts that the query service serves to browsers, as drawn by `migbatch report`."""

    page: bool = key(False, "Serve the page; needs [query] enabled and the extra `report`.")
    listen: str = key("127.0.0.1", "Address to listen on; on other than loopback addresses every page needs the token.")
    port: int = key(6832, "Port.", between(0, 65535))
    token_file: str = key(
        "",
        "File with a token, at least 32 bytes, for a page of all runs regardless of PrivateData (Authorization: "
        "Bearer, or as a password); owned by migbatchd's user, mode 0600. Empty: only this host can see the page, "
        "with what PrivateData shows to everyone.",
        absolute_or_empty,
    )
    days: int = key(30, "Number of days shown if the URL does not say.", between(1, 3660))


@dataclass(frozen=True)
class DaemonConfig:
    """migbatchd itself."""

    run_dir: str = key("/run/migbatch", "Directory of the lock file and the sockets; created if missing.", socket_path)
    log_level: str = key("info", "Level of messages logged to stderr.", one_of("debug", "info", "warning", "error"))
    queue: int = key(
        20000, "Number of records that can wait for the database before nodes are asked to retry.", between(10, 10**7)
    )
    audit: bool = key(True, "Cancel jobs that hold more slices than Slurm allocated to them.")
    record_hours: float = key(
        12.0,
        "Hours for which snapshots and decisions are kept in run_dir/decisions for `migbatch replay`; 0: none.",
        between(0, 1000),
    )
    record_mb: float = key(
        64.0, "Maximum size of these recordings in megabytes; the oldest are removed first.", between(1, 10**6)
    )

    @property
    def api_socket(self) -> str:
        """The unix socket for commands on this host."""
        return f"{self.run_dir}/api.sock"


@dataclass(frozen=True)
class GpuConfig:
    """Speed of a GPU model as a whole, by its short name ("h100-80gb"); 0 keeps the built-in value."""

    tflops: float = key(0.0, "Dense 16-bit matrix rate, 10^12 operations per second.", between(0, 1e6))
    bandwidth_gbs: float = key(0.0, "Memory bandwidth, 10^9 bytes per second.", between(0, 1e6))
    sm_count: int = key(0, "SMs outside MIG.", between(0, 10000))
    types: tuple[str, ...] = key((), "Additional names that users write in --gres=gpu:<type>.", names)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Specifications of one of the site's own models, by the name that users write in model=..."""

    family: str = key("other", "Group of similar models.", name)
    params_m: float = required("Parameters, in millions.", between(1e-6, 1e9))
    gflops: float = required("10^9 operations for one item of size `reference`.", between(1e-9, 1e12))
    unit: str = key("tok", "Unit of the input size: 'tok' or 'px' (side of a square).", one_of("tok", "px"))
    reference: int = required("Input size for which gflops and activation_mib are given.", between(1, 10**7))
    kernels: int = key(200, "Kernel launches in one forward pass.", between(1, 10**6))
    activation_mib: float = key(100.0, "Live activations of one item, in MiB.", between(1e-3, 1e7))
    kept_mib: float = key(0.0, "MiB that training takes for one item; 0: as is usual.", between(0, 1e8))
    weight_bytes: int = key(2, "Bytes per parameter as served.", between(1, 16))
    layers: int = key(0, "Attention layers; 0 if the work grows linearly.", between(0, 10**5))
    width: int = key(0, "Width of the attention layers.", between(0, 10**7))
    aliases: tuple[str, ...] = key((), "Other names of the model.", model_names)


@dataclass(frozen=True)
class Config:
    """The whole file; `gpus` and `models` have a table for each name."""

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
    #: path of the file, "" for defaults
    path: str = ""
