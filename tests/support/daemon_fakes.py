"""Strict, stateful fakes of the services that migbatchd communicates with."""

import dataclasses
import hashlib
import hmac
import http.client
import json
import secrets
import threading

from sqlalchemy.exc import OperationalError

from slurm_migbatch.daemon.ended import Standing
from slurm_migbatch.node.auth import AuthError, PeerIdentity
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.store.queries import geometries, last_offers, unconfirmed_ends
from slurm_migbatch.store.receipt import NOTHING, Receipt
from slurm_migbatch.store.recent import instance_events
from slurm_migbatch.store.recurring import Learnable, learnable, newest_lesson


class FakeSigner:
    """Signer with HMAC credentials that contain a uid; it refuses replays, as munge does."""

    scheme = "test"

    def __init__(self, key=b"k", uid=0):
        self.key, self.uid = key, uid
        self.seen = set()

    def sign(self, payload, node):
        nonce = secrets.token_hex(8)
        return f"{self.uid}.{nonce}.{self._mac(self.uid, nonce, payload)}"

    def verify(self, credential, payload, node):
        try:
            uid, nonce, mac = credential.split(".")
        except ValueError:
            raise AuthError("malformed credential") from None
        if not hmac.compare_digest(mac, self._mac(uid, nonce, payload)):
            raise AuthError("wrong signature")
        if nonce in self.seen:
            raise AuthError("replayed credential")
        self.seen.add(nonce)
        if uid != "0":
            raise AuthError(f"uid {uid} may not speak for a node")
        return PeerIdentity(int(uid), "localhost")

    def _mac(self, uid, nonce, payload):
        return hmac.new(self.key, f"{uid}.{nonce}.".encode() + payload, hashlib.sha256).hexdigest()


class FakeStore:
    """A store that keeps each event once, by (node, journal, seq); can be locked."""

    moved = False
    locked_by = ""

    def __init__(self):
        self.events = {}
        self.complete = set()
        self.jobs = {}
        self.decisions = []
        self.supply = []
        self.done = []
        self.gpus = {}
        self.locked = False
        self.closed = False
        self.lock = threading.Lock()

    def _check(self):
        assert not self.closed, "used after close"
        if self.locked:
            raise OperationalError("insert", {}, Exception("database is locked"))

    def ingest(self, node, journal, boot_id, events, claim=NOTHING):
        self._check()
        with self.lock:
            for event in events:
                if event["kind"] == "poison":
                    raise ValueError("this event means nothing")
                self.events.setdefault((node, journal, event["seq"]), event)
                if event["kind"] in ("inventory", "state"):
                    self.gpus[node] = event["gpus"]
            seq = 0
            while (node, journal, seq + 1) in self.events:
                seq += 1
            if claim.database != "d1" or claim.acked > seq:
                self.complete.discard(node)
            if any(event["kind"] == "state" for event in events):
                self.complete.add(node)
            if claim.incomplete:
                self.complete.discard(node)
            return Receipt(seq, "d1", node in self.complete)

    def read(self, query, *args, **kwargs):
        self._check()
        offers = {node: counts for node, _, counts, _ in self.supply}
        answers = {
            learnable: Learnable(0, 0.0),
            newest_lesson: 0,
            instance_events: {},
            geometries: {},
            last_offers: offers,
            unconfirmed_ends: frozenset(),
        }
        return answers[query]

    def leases(self):
        self._check()
        return []

    def save_loans(self, rows, actions=()):
        self._check()
        self.done.extend(actions)

    def actions(self, jobs=(), limit=1000):
        self._check()
        return [row for row in self.done if not jobs or row["job_id"] in jobs][-limit:]

    def record_supply(self, node, ts, version, counts, why):
        self._check()
        self.supply.append((node, version, dict(counts), why))

    def record_decisions(self, decisions):
        self._check()
        self.decisions.extend(decisions)

    def upsert_jobs(self, rows, *, live=None):
        self._check()
        for row in rows:
            self.jobs[row["job_id"]] = self.jobs.get(row["job_id"], {}) | row
        for job, row in self.jobs.items():
            if live is not None and job not in live and row["state"] != "CANCELLED":
                self.jobs[job] = {**row, "state": "GONE"}

    def inventory(self):
        self._check()
        return dict(self.gpus)

    def reconnect(self):
        pass

    def bound_log(self, give_up):
        assert not self.closed, "used after close"

    def close(self):
        self.closed = True


class FakeSlurm:
    """A queue that refuses what real Slurm would refuse; can be unreachable."""

    def __init__(self):
        self.queue = {}
        self.node_rows = {}
        self.away = False
        self.cancelled = []
        self.has_lost_its_state = False
        self.ends = {}
        self.updates = []
        self.private = ""

    def _check(self):
        if self.away:
            raise SlurmError("scontrol: Unable to contact slurm controller (connect failure)")

    def jobs(self):
        self._check()
        return list(self.queue.values())

    def jobs_on(self, nodes):
        return [row for row in self.jobs() if not nodes.isdisjoint(row.nodes)]

    def nodes(self):
        self._check()
        return list(self.node_rows.values())

    def gpu_defaults(self):
        self._check()
        return {}

    def hidden_partitions(self):
        self._check()
        return frozenset()

    def backfill_window_s(self):
        self._check()
        return 86_400.0

    def set_gres(self, updates):
        self._check()
        for name, text in updates.items():
            row = self.node_rows[name]
            counts = dict(gres.counts(text, "mig").items())
            assert sum(counts.values()) == sum(row.gres.values()), "the sum changes: slurmd's registration would drain"
            self.node_rows[name] = dataclasses.replace(row, gres=counts)

    def _named(self, name):
        rows = self.queue.values()
        return next((r.job_id for r in rows if name in (str(r.job_id), f"{r.array_job}_{r.array_task}")), name)

    def update_jobs(self, updates):
        self._check()
        for job_id, fields in updates.items():
            if self._named(job_id) not in self.queue:
                raise SlurmError("Invalid job id specified")
            self.updates.append((job_id, fields))

    def cancel(self, job_id):
        self._check()
        job = self._named(job_id)
        if self.queue.pop(job, None):
            self.ends[job] = {"job_id": job, "state": "CANCELLED", "exit_code": "0:15", "restarts": 0}
        self.cancelled.append(job_id)

    def requeue_ended(self, job_id, *, update):
        self._check()
        del self.ends[job_id]
        comment = "migbatch: retry=oom [mig:1g.10gb:1#abc]"
        self.queue[job_id] = JobRow(job_id, gres="gres/mig:1g.10gb:1", comment=comment, restarts=1)
        self.release_requeued(job_id, str(job_id), update=update)

    def release_requeued(self, job_id, job, *, update):
        self._check()
        row = self.queue[job_id]
        assert not row.priority, "released before"
        self.update_jobs({job: update(row)})
        self.queue[job_id] = dataclasses.replace(row, priority=1)

    def ended(self, job_ids):
        self._check()
        return [self.ends[id] for id in job_ids if id in self.ends]

    def lost(self, listed):
        self._check()
        return [job for job in listed if self.has_lost_its_state and job not in self.queue]

    def version(self):
        self._check()
        return (24, 11)

    def settings(self):
        self._check()
        return {"privatedata": self.private, "slurmctldhost[0]": "localhost"}

    def node_addresses(self):
        self._check()
        return {name: frozenset({at}) for name, at in (("n1", "127.0.0.1"), ("n2", "127.0.0.2"), ("n3", "192.0.2.3"))}

    def standing(self, user):
        self._check()
        return Standing()


class Node:
    """A client of the node API over a real socket; `source` is its source address."""

    def __init__(self, port, signer, name="n1", source="127.0.0.1"):
        self.port, self.signer, self.name, self.source = port, signer, name, source
        self.database = ""

    def credential(self, path, raw, method="POST"):
        digest = hashlib.sha256(raw).hexdigest()
        return self.signer.sign(f"{method} {path}\n{self.name}\n{digest}\n".encode(), self.name)

    def headers(self, path, raw, credential=None, method="POST"):
        credential = credential or self.credential(path, raw, method)
        return {
            "Authorization": f"MigBatch {self.signer.scheme} {credential}",
            "X-Migbatch-Node": self.name,
            "X-Migbatch-Digest": hashlib.sha256(raw).hexdigest(),
        }

    def send(self, path, body, *, credential=None, method="POST", headers=None):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        credential = credential or self.credential(path, raw, method)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120, source_address=(self.source, 0))
        try:
            connection.request(method, path, raw, {**self.headers(path, raw, credential, method), **(headers or {})})
            answer = connection.getresponse()
            text = answer.read()
            signature = answer.headers.get("X-Migbatch-Signature")
        finally:
            connection.close()
        if signature is not None:
            digest = hashlib.sha256(credential.encode()).hexdigest()
            self.signer.verify(signature, f"RESPONSE {digest}\n".encode() + text, self.name)
        elif answer.status == 200 and method == "POST":
            raise AssertionError("an unsigned answer")
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode()

    def events(self, *events, journal="ab12", **options):
        """Send events and adopt the database that answers, as a node does; return only the acknowledged number."""
        body = {"node": self.name, "journal": journal, "boot_id": "b1", "database": self.database}
        status, answer = self.send("/node/v1/events", {**body, "events": list(events)}, **options)
        if status == 200:
            self.database = answer["database"]
            answer = {"acked": answer["acked"]}
        return status, answer

    def plan(self, have=0, wait=0):
        return self.send("/node/v1/plan", {"node": self.name, "have": have, "wait": wait})


def _info(name, number, compute, memory, limit, starts):
    return {
        "profile": name,
        "profile_id": number,
        "compute_slices": compute,
        "memory_slices": memory,
        "memory_mib": memory * 9984,
        "sm_count": compute * 16,
        "copy_engines": compute,
        "decoders": compute,
        "encoders": 0,
        "jpegs": compute,
        "ofas": 0,
        "max_instances": limit,
        "placements": [[start, memory] for start in starts],
    }


GEOMETRY = {
    "version": 1,
    "name": "NVIDIA H100 80GB HBM3",
    "profiles": [
        _info("1g.10gb", 19, 1, 1, 7, range(7)),
        _info("2g.20gb", 14, 2, 2, 3, range(0, 6, 2)),
        _info("3g.40gb", 9, 3, 4, 2, range(0, 8, 4)),
        _info("7g.80gb", 0, 7, 8, 1, range(1)),
    ],
}


def gpu(number, **changes):
    """Return an inventory entry."""
    entry = {"uuid": f"GPU-{number}", "minor": number, "index": number, "name": GEOMETRY["name"], "mig": True}
    return {**entry, "geometry": GEOMETRY, **changes}


def inventory(*gpus, seq=1):
    """Return an inventory event."""
    return {"seq": seq, "ts": 1.0, "kind": "inventory", "gpus": list(gpus)}


def state(*gpus, runs=(), zombies=(), idle=(), seq=1):
    """Return a state event: everything that a node holds."""
    fields = {"gpus": list(gpus), "runs": list(runs), "zombies": list(zombies), "idle": list(idle)}
    return {"seq": seq, "ts": 1.0, "kind": "state", **fields}
