"""migbatch.toml: what is accepted, and which problem is reported on which line for the rest."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.config import Config, ConfigError, load, loads, render, text_of


def problems(text):
    with pytest.raises(ConfigError) as caught:
        loads(text, "m.toml")
    return re.split("; (?=m.toml)", str(caught.value))


def test_empty_file_is_the_defaults():
    assert loads("", "") == Config()


def test_default_text_holds_every_default_and_parses_back():
    text = render()
    uncommented = "\n".join(line[1:] if line.startswith("#") and " = " in line else line for line in text.splitlines())
    assert loads(text, "") == Config()
    assert "ack_wait_s = 0.5" in uncommented


def test_values_are_set_and_survive_a_round_trip():
    values = {
        "cluster": {"partitions": ["gpu", "long"], "slurm_bin": "/opt/slurm/bin"},
        "node_api": {"port": 7000, "auth": "token"},
        "supply": {"enabled": False, "preference": ["3g.40gb", "1g.10gb+me"]},
        "models": {"org/net-1": {"params_m": 340, "gflops": 80.5, "reference": 128, "aliases": ["net"]}},
        "gpus": {"h100-80gb": {"tflops": 900}},
    }
    config = loads(render(values))
    assert config.cluster.partitions == ("gpu", "long")
    assert config.node_api.port == 7000
    assert config.supply.enabled is False
    assert config.supply.preference == ("3g.40gb", "1g.10gb+me")
    assert config.models["org/net-1"].params_m == 340
    assert config.models["org/net-1"].aliases == ("net",)
    assert config.gpus["h100-80gb"].tflops == 900
    assert config.gpus["h100-80gb"].bandwidth_gbs == 0


def test_rendering_an_unknown_key_is_refused():
    with pytest.raises(KeyError, match="prot"):
        render({"node_api": {"prot": 1}})


def test_unknown_key_names_its_line_and_the_likely_key():
    assert problems("[cluster]\n\n# text\npartition = ['gpu']\n") == [
        "m.toml:4: unknown key 'partition', did you mean 'partitions'? in [cluster]"
    ]


def test_unknown_section_names_its_line():
    assert problems("[submit]\n[sumbit]\n") == ["m.toml:2: unknown section 'sumbit', did you mean 'submit'?"]


def test_all_problems_are_reported_at_once_in_file_order():
    found = problems(
        '[supply]\nack_wait_s = "fast"\nenabled = 1\n[node_api]\nport = 70000\nauth = "kerberos"\n'
        '[submit]\nsocket = "relative.sock"\ndefault_profile = "1g"\n'
    )
    assert [line.split(": ")[0] for line in found] == [f"m.toml:{n}" for n in (2, 3, 5, 6, 8, 9)]
    assert "supply.ack_wait_s must be a number" in found[0]
    assert "supply.enabled must be true or false" in found[1]
    assert "between 0 and 65535, not 70000" in found[2]
    assert "one of 'munge', 'token', not 'kerberos'" in found[3]
    assert "absolute path" in found[4]
    assert "1g.10gb" in found[5]


def test_learning_section_is_checked_line_by_line():
    found = problems('[learning]\nmodels = "here"\nevery = 5\nkeep = 1\nconfidence = 1.0\n')
    assert [line.split(": ")[0] for line in found] == [f"m.toml:{n}" for n in (2, 3, 4, 5)]
    assert "absolute path" in found[0] and "every_s" in found[1]
    assert "#min_new = 20" in render() and loads(render({"learning": {"keep": 9}})).learning.keep == 9


@pytest.mark.parametrize(("value", "message"), [("", "at least one node"), ("none[1-", "must be a host list")])
def test_catalog_nodes_must_be_a_host_list(value, message):
    """A line `NodeName= NodeAddr=...` would keep slurmctld from starting."""
    (problem,) = problems(f'[cluster]\ncatalog_nodes = "{value}"\n')
    assert problem.startswith("m.toml:2: cluster.catalog_nodes must") and message in problem
    assert loads('[cluster]\ncatalog_nodes = "none[1-2],other"\n').cluster.catalog_nodes == "none[1-2],other"


@pytest.mark.parametrize(("section", "key"), [("submit", "socket"), ("daemon", "run_dir")])
def test_path_that_is_too_long_for_sockets_is_refused(section, key):
    """The submit service would end with an error again and again."""
    longest = "/" + "x" * 95
    assert loads(f'[{section}]\n{key} = "{longest}"\n')
    (problem,) = problems(f'[{section}]\n{key} = "{longest}x"\n')
    assert problem.startswith(f"m.toml:2: {section}.{key} must have at most 96 bytes")


def test_syntax_error_names_its_line():
    (problem,) = problems("[cluster]\npoll_s = 1\npoll_s == 2\n")
    assert problem.startswith("m.toml:3: is not valid TOML: ")


@pytest.mark.parametrize("opening", ["[", "{a = "])
def test_text_nested_too_deeply_is_refused(opening):
    (problem,) = problems(f"[moves]\nx = {opening * 5000}")
    assert problem == "m.toml: is not valid TOML: its lists or tables are nested too deeply"


def test_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "m.toml"
    path.write_bytes(b"\xef\xbb\xbf[moves]\nrest_s = 60\n")
    assert load(path).moves.rest_s == 60
    path.write_bytes(b"\xef\xbb\xbfpoll_s = 1\n")
    with pytest.raises(ConfigError, match=r"m\.toml:1: unknown key 'poll_s'"):
        load(path)


def test_key_outside_a_section_is_refused():
    (problem,) = problems("poll_s = 1\n")
    assert problem.startswith("m.toml:1: unknown key 'poll_s'")


def test_section_written_as_a_value_is_refused():
    assert problems("cluster = 3\n") == ["m.toml:1: cluster must be a section, [cluster]"]


def test_line_numbers_are_right_after_multi_line_values():
    text = '[cluster]\npartitions = [\n  "a",\n  "b",\n]\ncatalog_nodes = """\nslurm_bin = 3"""\nslurm_bin = 3\n'
    found = problems(text)
    assert any(line.startswith("m.toml:8: cluster.slurm_bin") for line in found)


def test_problems_of_dotted_and_quoted_keys_name_their_line():
    found = problems('supply.ack_wait_s = -1\n[models."org/x"]\nparams_m = [1]\ngflops = 1\nreference = 1\n')
    assert found[0].startswith("m.toml:1: supply.ack_wait_s must be between")
    assert found[1] == "m.toml:3: models.org/x.params_m must be a number"


def test_models_must_be_tables_with_valid_names():
    assert problems("[models]\nbert = 3\n")[0].startswith("m.toml:2: models.bert must be a section")
    assert "'a b' is not one" in problems('[models."a b"]\nparams_m = 1\n')[0]


def test_models_require_gflops_and_reference():
    assert problems("[models.x]\nparams_m = 1\n") == ["m.toml:1: [models.x] needs gflops and reference"]


def test_booleans_are_not_numbers():
    assert problems("[node_api]\nport = true\n") == ["m.toml:2: node_api.port must be a whole number"]


def test_error_for_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="config render migbatch"):
        load(tmp_path / "none.toml")


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "m.toml"
    path.write_bytes(b"[cluster]\nslurm_user = '\xff'\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)


@given(st.text(max_size=200))
def test_any_text_is_a_config_or_a_config_error(text):
    try:
        loads(text)
    except ConfigError as error:
        assert error.problems


def test_lending_is_checked_line_by_line():
    found = problems(
        '[lending]\nenabeld = true\nblackout = ["Mon-Fri 8:00-18:00", "Funday 08:00-09:00"]\nsure = 1\n'
        "partitions = ['a b']\n[lending.quota]\nml = 56\nvision = '3'\nnlp = -1\n\"a b\" = 2\n"
    )
    assert [line.split(": ")[0] for line in found] == [f"m.toml:{n}" for n in (2, 3, 4, 5, 8, 9, 10)]
    assert "did you mean 'enabled'" in found[0]
    assert "'funday' is no day" in found[1]
    assert found[4] == "m.toml:8: lending.quota.vision must be a whole number"
    assert found[5] == "m.toml:9: lending.quota.nlp must be between 0 and 1000000, not -1"
    assert "plain name of an account" in found[6]
    assert problems("[lending]\nquota = 3\n")[0].startswith("m.toml:2: lending.quota must be a table")


def test_quota_may_be_a_section_or_written_on_one_line():
    quotas = {"ml": 56, "vision.lab": 0}
    written = loads(render({"lending": {"partitions": ["train"], "quota": quotas, "blackout": ["22:00-06:00"]}}))
    assert written.lending.quota == quotas and written.lending.blackout == ("22:00-06:00",)
    assert loads('[lending.quota]\nml = 56\n"vision.lab" = 0\n').lending.quota == quotas
    assert loads(text_of(written), "") == replace(written, path="")
    assert loads("[lending]\n").lending.quota == {} and not loads("").lending.enabled


def test_dispatch_section_is_read_and_checked():
    assert loads("[dispatch]\nenabled = false\n").dispatch.enabled is False
    assert problems("[dispatch]\nevery_s = 0\n") == ["m.toml:2: dispatch.every_s must be between 0.1 and 3600, not 0"]


def test_lending_requires_partitions_that_migbatch_manages():
    assert problems("[lending]\n\nenabled = true\n")[0].startswith(
        "m.toml:3: lending.enabled requires lending.partitions"
    )
    found = problems("[cluster]\npartitions = ['gpu']\n[lending]\nenabled = true\npartitions = ['train']\n")
    assert found == ["m.toml:5: lending.partitions names train, which are not in cluster.partitions"]
    assert loads("[lending]\npartitions = []\n").lending.enabled is False
    found = problems("[lending]\npartitions = ['train']\ntraining_only = ['train', 'gpu']\n")
    assert found == ["m.toml:3: lending.training_only names gpu, which are not in lending.partitions"]


@pytest.mark.parametrize(
    "url",
    ["mysql:/u:s3cret@db/x", "mysql://u:s@s:3cret@db/x", "mariadb://u:s@3cret@db/x", "mariadb://u:s3cret@db:33o6/x"],
)
def test_url_that_no_driver_can_read_is_refused_without_its_password(url):
    (problem,) = problems(f"[store]\nurl = '{url}'\n")
    assert problem.startswith("m.toml:2: store.url must be a database URL") and "%40" in problem
    assert "3cret" not in problem


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////srv/a@b:c/migbatch.db",
        "mariadb://u:p%40s/#?[w@db1:3306/x?charset=utf8mb4",
        "postgresql://u@/x?host=/run/postgresql",
        "postgresql+psycopg://[fd00::1]:5432/x",
        "mysql://db1",
    ],
)
def test_urls_of_databases_are_accepted(url):
    assert loads(f"[store]\nurl = '{url}'\n").store.url == url
