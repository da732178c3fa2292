"""slurm.conf is read as Slurm reads it, and changed only where necessary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.install.hosts import slurmctld_hosts
from slurm_migbatch.install.slurmconf import added, apply, changed, edit, load, parse
from slurm_migbatch.install.undo import undo
from tests.support.examples import examples

MAIN = "/etc/slurm/slurm.conf"
line_texts = st.sampled_from(
    [
        "GresTypes=gpu",
        "grestypes = gpu,mps",
        'Prolog="/a b/*"',
        "# NodeName=x Gres=no",
        "NodeName=n[1-2] Gres=gpu:2 # old",
        "NodeName=n3 \\\n  Gres=gpu:1 \\\n  Feature=a",
        "PartitionName=p \\",
        "Nodes=ALL",
        "Key=a\\#b",
        "",
        "   ",
        "\t# only a comment \\",
        "Include other.conf",
        "no sense at all",
        "Odd=\udcff\r",
    ]
)
texts = st.builds(
    lambda lines, end: "\n".join(lines) + end, st.lists(line_texts, max_size=12), st.sampled_from(["", "\n"])
)


def conf_of(text, **others):
    files = {MAIN: text, **{f"/etc/slurm/{name}.conf": value for name, value in others.items()}}
    return load(MAIN, files.get)


@given(texts)
@settings(max_examples=examples(400))
def test_parsed_positions_match_the_text(text):
    last = 0
    for line in parse(MAIN, text):
        assert line.start >= last and text.count("\n", 0, line.start) == line.number - 1
        last = line.end
        for token in line.tokens:
            shown = text[token.start : token.end].strip('"')
            assert line.start <= token.start < token.end <= line.end
            assert token.value == shown or "\\\n" in shown


@given(texts, st.data())
@settings(max_examples=examples(400))
def test_edit_changes_only_its_value_and_can_be_undone(text, data):
    conf = conf_of(text)
    lines = [line for line in conf.lines if line.tokens]
    if not lines:
        return
    line = data.draw(st.sampled_from(lines))
    token = data.draw(st.sampled_from(line.tokens))
    new = apply(conf.texts, [edit(conf, line, {token.key: "new,words"})])[MAIN]
    value = line.get(token.key)
    shown = '"new,words"' if text[value.start] == '"' else "new,words"
    assert new == text[: value.start] + shown + text[value.end :]
    again = next(other for other in parse(MAIN, new) if other.start == line.start)
    assert again.get(token.key).value == "new,words"
    assert [token.key for token in again.tokens] == [token.key for token in line.tokens]
    assert changed(new, again, {token.key: "new,words"}) == new[again.start : again.end]
    assert undo(text, new, new) == text


@given(texts)
@settings(max_examples=examples(300))
def test_added_line_is_parsed_as_a_separate_line(text):
    conf = conf_of(text)
    new = apply(conf.texts, [added(conf, "Include migbatch.conf")])[MAIN]
    assert new.startswith(text)
    assert list(parse(MAIN, new))[-1].include == "migbatch.conf"
    assert [line.tokens for line in parse(MAIN, new)][:-1] == [line.tokens for line in parse(MAIN, text)]


@given(texts, texts, texts)
@settings(max_examples=examples(300))
def test_undo_keeps_lines_added_by_others(before, after, more):
    conf = conf_of(before)
    new = apply(conf.texts, [added(conf, "Include migbatch.conf")])[MAIN]
    present = new + "Late=1\n" + more
    back = undo(before, new, present)
    lead = new[len(before) :].removesuffix("Include migbatch.conf\n")
    assert back is None or back == before + "Late=1\n" + more or (lead and back.startswith(before))


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("place", range(6))
def test_undo_keeps_lines_that_others_put_between_ours(place, end):
    """A site adds partitions below its last one, which is above our `Include`."""
    original = f"GresTypes=gpu\nNodeName=n1 A=1\nPartitionName=a Nodes=n1\nPrologEpilogTimeout=20{end}"
    written = (
        "GresTypes=gpu,mig\nNodeName=n1 A=1 Gres=mig\nPartitionName=a Nodes=n1,c\nPrologEpilogTimeout=60\n"
        "Include migbatch.conf\n"
    )
    present, then = written.splitlines(keepends=True), original.splitlines(keepends=True)
    present.insert(place, "PartitionName=DEFAULT MaxTime=1\n")
    then.insert(place, "PartitionName=DEFAULT MaxTime=1\n")
    if place >= 4 and not end:
        then[3] += "\n"
    assert undo(original, written, "".join(present)) == "".join(then)
    assert undo(original, written, "".join(present).replace("n1,c", "n1,n2,c")) is None


def test_lines_between_parts_of_one_line_of_the_site_are_left_to_it():
    """Whether they belong above or below it is unknown."""
    original, added_line = "NodeName=n[1-2]\nPartitionName=a Nodes=n1\n", "NodeName=DEFAULT A=1\n"
    ours = ["NodeName=n1 Gres=mig\n", "NodeName=n2 Gres=mig\n", "PartitionName=a Nodes=n1,c\n", "Include m\n"]
    found = [undo(original, "".join(ours), "".join([*ours[:k], added_line, *ours[k:]])) for k in range(5)]
    assert found == [added_line + original, None, None, original + added_line, original + added_line]


def test_continuations_comments_and_letter_case_are_parsed():
    conf = conf_of("GRESTYPES=gpu,\\\nmps # both\n#GresTypes=none\nPrologFlags=Alloc\\#x # y\n")
    line, token = conf.setting("GresTypes")
    assert (line.number, token.value) == (1, "gpu,mps")
    assert conf.value("prologflags") == "Alloc\\#x"
    assert str(edit(conf, line, {"grestypes": "gpu,mps,mig"})).startswith(f"{MAIN}:1: ")


def test_last_value_of_a_setting_is_used_and_records_are_ignored():
    conf = conf_of("PreemptMode=OFF\nPartitionName=p PreemptMode=REQUEUE\nInclude b.conf\n", b="PreemptMode=GANG\n")
    line, token = conf.setting("PreemptMode")
    assert (line.path, line.number, token.value) == ("/etc/slurm/b.conf", 1, "GANG")
    assert conf.missing == ()
    assert [where for where, _ in conf_of("Include gone.conf\n").missing] == ["/etc/slurm/gone.conf"]


def test_records_inherit_from_preceding_default_lines():
    conf = conf_of("NodeName=a CPUs=1\nNodeName=DEFAULT CPUs=8 Feature=x\nNodeName=b\nNodeName=c CPUs=2\n")
    found = {values["nodename"]: values for _, values in conf.records("nodename")}
    assert found["a"] == {"nodename": "a", "cpus": "1"}
    assert found["b"]["cpus"] == "8" and found["c"] == {"nodename": "c", "cpus": "2", "feature": "x"}


@pytest.mark.parametrize("name", ["c1", "C1"])
def test_include_with_the_cluster_name_is_resolved(name):
    """Slurm keeps the name in lower case."""
    files = {MAIN: f"ClusterName={name}\nInclude nodes-%c.conf\n", "/etc/slurm/nodes-c1.conf": "NodeName=a\n"}
    conf = load(MAIN, files.get)
    assert [values["nodename"] for _, values in conf.records("nodename")] == ["a"] and not conf.missing


@pytest.mark.parametrize("where", ["/etc/slurm/gpus.conf", "/etc/slurm/parts/gpus.conf"])
def test_include_in_an_included_file_is_resolved(where):
    """Slurm 22.05 looks beside the file that includes it, 23.11 and later beside slurm.conf."""
    files = {MAIN: "Include parts/n.conf\n", "/etc/slurm/parts/n.conf": "Include gpus.conf\n", where: "NodeName=a\n"}
    conf = load(MAIN, files.get)
    assert [line.path for line, _ in conf.records("nodename")] == [where] and not conf.missing


def test_circular_includes_are_reported():
    with pytest.raises(OSError, match="include each other"):
        conf_of("Include slurm.conf\n")


def test_all_slurmctld_hosts_are_listed():
    conf = load("/c", {"/c": "SlurmctldHost=ctl1(10.0.0.1)\nSlurmctldHost=ctl2\nNodeName=n1\n"}.get)
    assert slurmctld_hosts(conf) == ["ctl1(10.0.0.1)", "ctl2"]
    assert slurmctld_hosts(load("/c", {"/c": "ControlMachine=old\n"}.get)) == ["old"]
