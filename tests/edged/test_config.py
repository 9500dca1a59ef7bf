"""The TOML file: its defaults, its example, and how mistakes in it are told."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edged import config
from edged.addresses import UNIX_PATH_MAX_BYTES
from edged.config import ConfigError, Settings, TcpListen, UnixListen
from engine.protocol import OBJECTIVES

EXAMPLE = Path(__file__).parents[2] / "deploy" / "edged.toml"
SECTIONS = "model, lora, serve, learn, reward, practice, gate, watch, adapters, placement, api, store, log"
NAMES = ", ".join(OBJECTIVES)
DOTTED_KEYS = [f"{section}.{key}" for section, key, _ in config.all_keys()]


def problems(text: str, folder: Path, overrides: dict[str, Any] | None = None) -> list[str]:
    file = folder / "edged.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load(file, overrides)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return list(caught.value.problems)


def problems_or_none(file: Path | None, overrides: dict[str, Any]) -> tuple[str, ...] | None:
    try:
        config.load(file, overrides)
    except ConfigError as error:
        return error.problems
    return None


def test_the_example_file_shows_every_key_with_its_default() -> None:
    document = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    shown = [f"{section}.{key}" for section, table in document.items() for key in table]
    assert shown == DOTTED_KEYS
    assert config.load(EXAMPLE) == config.load(None) == Settings()


def test_the_example_file_explains_every_key_on_the_line_before_it_and_marks_the_live_ones() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    start = 0
    for section, key, info in config.all_keys():
        at = next(i for i in range(start, len(lines)) if lines[i].startswith(f"{key} = "))
        start = at + 1
        comment = lines[at - 1]
        assert comment.startswith("# "), f"{section}.{key} has no comment"
        assert info.description is not None
        assert info.description in comment
        assert ("(live)" in comment) == (f"{section}.{key}" in _live_keys())


def test_five_mistakes_are_all_told_at_once(tmp_path: Path) -> None:
    text = """
        [learn]
        batch_ratings = 0
        epochs = "two"
        learning_rat = 0.1
        [lern]
        enabled = false
        [log]
        level = "loud"
    """
    assert problems(text, tmp_path) == [
        "learn.batch_ratings: got 0, expected a whole number >= 1 and <= 4096",
        'learn.epochs: got "two", expected a whole number >= 1 and <= 32',
        "learn.learning_rat: got an unknown key, expected a key of [learn]; did you mean learn.learning_rate?",
        f"lern: got an unknown section, expected one of {SECTIONS}; did you mean learn?",
        'log.level: got "loud", expected one of "debug", "info", "warning", "error"',
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[learn]\nrank = 4", "learn.rank: got an unknown key, expected a key of [learn]; did you mean lora.rank?"),
        ("[learn]\nseed = 1.0", "learn.seed: got 1.0, expected a whole number >= 0 and < 2147483648"),
        ("[learn]\nenabled = 1", "learn.enabled: got 1, expected true or false"),
        ("[learn]\ngamma = nan", "learn.gamma: got NaN, expected a number >= 0 and <= 1"),
        ("[learn]\ngamma = true", "learn.gamma: got true, expected a number >= 0 and <= 1"),
        ("[lora]\nlayers = 0", 'lora.layers: got 0, expected "auto", "top_third", "all" or a whole number >= 1'),
        ("[model]\npath = ''", 'model.path: got "", expected a text that is not empty'),
        (
            "[placement]\ntrain_device = 'gpu'",
            'placement.train_device: got "gpu", expected "auto", "cpu", "cuda" or "cuda:N"',
        ),
        ("[placement]\nactor = 1", "placement.actor: got 1, expected a list of device numbers, as in [0, 1]"),
        (
            "[placement]\ncritic = [0, -1]",
            "placement.critic: got [0, -1], expected a list of device numbers, as in [0, 1]",
        ),
        (
            "[placement]\nactor = [1]\ntrain_device = 'cpu'",
            'placement.actor: got [1], expected [] beside placement.train_device ("cpu"): one of them says where',
        ),
        ("[gate]\nfluency_prompts = []", "gate.fluency_prompts: got [], expected a list of texts that is not empty"),
        (
            "[serve]\ncontext_tokens = 256\ndefault_max_tokens = 64\n[practice]\nmax_tokens = 64\n"
            "[gate]\nfluency_tokens = 512",
            "gate.fluency_tokens: got 512, expected <= 161 beside serve.context_tokens (256): the longest of"
            " gate.fluency_prompts, 95 tokens or so, and its answer must fit into the context; ask for fewer,"
            " shorten it or enlarge that",
        ),
        (
            "[gate]\nfluency_prompts = ['Why?', '" + "word " * 4096 + "']",
            "gate.fluency_tokens: got 24, expected <= 0 beside serve.context_tokens (10240): the longest of"
            " gate.fluency_prompts, 10304 tokens or so, and its answer must fit into the context; ask for fewer,"
            " shorten it or enlarge that",
        ),
        (
            "[api]\nmax_body_bytes = 16777216",
            "api.max_body_bytes: got 16777216, expected a whole number >= 1024 and <= 16711680",
        ),
        ("[api]\nallowed_hosts = 'box'", 'api.allowed_hosts: got "box", expected a list of texts'),
        ("learn = 3", "learn: got 3, expected a section [learn]"),
        ("[[learn]]\nepochs = 1", 'learn: got [{"epochs": 1}], expected a section [learn]'),
        (
            "[learn]\nbatch_ratings = 100",
            "learn.batch_ratings: got 100, expected <= learn.max_batch (64):"
            " the new ratings of an update must fit into it",
        ),
        (
            "[gate]\nlive_kl_max = 0.1",
            "learn.live_kl_max: got 0.3, expected <= gate.live_kl_max (0.1):"
            " the gate would refuse updates that the trainer allows",
        ),
        (
            "[learn]\nkl_target = 0.05\nkl_coef = 0",
            "learn.kl_coef: got 0, expected > 0 beside learn.kl_target (0.05): 0 stays 0 however it is multiplied;"
            " begin at 0.1",
        ),
        (
            "[reward]\nsource = 'function'",
            'reward.function: got "", expected a value: reward.source is "function"',
        ),
        ("[reward]\nsource = 'http'", 'reward.url: got "", expected a value: reward.source is "http"'),
        (
            "[reward]\nsource = 'classifier'",
            'reward.classifier: got "", expected a value: reward.source is "classifier"',
        ),
        ("[reward]\nfunction = 'judges.short'", 'reward.function: got "judges.short", expected module:function'),
        (
            "[reward]\nurl = 'localhost:8000'",
            'reward.url: got "localhost:8000", expected an address that begins with http:// or https://',
        ),
        (
            "[practice]\ngroup_size = 20\n[learn]\nmax_batch = 16",
            "practice.group_size: got 20, expected <= learn.max_batch (16): a group must fit into an update",
        ),
        (
            "[reward]\nfitted_accuracy_min = 0.4",
            "reward.fitted_accuracy_min: got 0.4, expected a number >= 0.5 and < 1",
        ),
        (
            "[api]\nlisten = ['tcp:[::1]:80', 'tcp:[::1]:80']",
            'api.listen: got "tcp:[::1]:80" twice, expected different addresses',
        ),
    ],
)
def test_a_mistake_is_told_with_its_key_what_is_there_and_what_is_expected(
    text: str, problem: str, tmp_path: Path
) -> None:
    assert problems(text, tmp_path) == [problem]


def test_a_contradiction_is_not_told_of_keys_that_are_wrong_themselves(tmp_path: Path) -> None:
    assert problems("[learn]\nbatch_ratings = 100\nmax_batch = 0", tmp_path) == [
        "learn.max_batch: got 0, expected a whole number >= 2 and <= 8192"
    ]


@pytest.mark.parametrize(
    ("source", "rest"),
    [
        ("function", "function = 'shop.judges:Judges.short'"),
        ("http", "url = 'http://127.0.0.1:8000/judge?kind=short'"),
        ("classifier", "classifier = '/models/judge'"),
        ("fitted", ""),
    ],
)
def test_a_judge_is_taken_where_an_objective_learns_from_it_and_refused_where_none_does(
    source: str, rest: str, tmp_path: Path
) -> None:
    judge = f"[reward]\nsource = '{source}'\n{rest}"
    file = tmp_path / "edged.toml"
    file.write_text(judge)
    assert config.load(file).reward.source == source
    (problem,) = problems(f"[learn]\nobjectives = {{ dpo = 1.0 }}\n{judge}", tmp_path)
    assert "expected one of ppo, reinforce_pp, grpo, rloo, kto among them" in problem


def test_a_syntax_error_is_told_with_its_line(tmp_path: Path) -> None:
    (line,) = problems("[learn]\nepochs = 2\nseed == 3\n", tmp_path)
    assert "not valid TOML" in line
    assert "line 3" in line


@pytest.mark.parametrize("content", [b"[model]\nname = '\xff'", b"x = " + b"[" * 5000, b"x = " + b"9" * 5000])
def test_a_file_that_is_no_usable_toml_is_one_problem(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert len(caught.value.problems) == 1
    assert str(file) in caught.value.problems[0]


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.load(tmp_path / "none.toml")


def test_overrides_lie_over_the_file_and_are_checked_like_it(tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text("[serve]\nslots = 4\nthreads = 2\n", encoding="utf-8")
    settings = config.load(file, {"serve.slots": 8, "api.listen": ["unix:/run/a.sock"]})
    assert (settings.serve.slots, settings.serve.threads) == (8, 2)
    assert settings.api.listen == (UnixListen(Path("/run/a.sock")),)
    assert problems("[serve]\nslots = 4", tmp_path, {"serve.slots": 0, "serve.slot": 1, "slots": 1}) == [
        "serve.slot: got an unknown key, expected a key of [serve]; did you mean serve.slots?",
        "serve.slots: got 0, expected a whole number >= 1 and <= 248",
        f"slots: got an unknown section, expected one of {SECTIONS}; did you mean serve.slots?",
    ]


def test_settings_cannot_be_changed() -> None:
    settings = config.load(None)
    with pytest.raises(ValidationError, match="frozen"):
        settings.learn.epochs = 3


@pytest.mark.parametrize(
    "url", ["http://[::1/judge", "http://box:99999/", "http://box:0/", "http:///judge", "ftp://box", "http://b ox/"]
)
def test_an_address_that_no_client_could_reach_is_no_reward_service(url: str, tmp_path: Path) -> None:
    (line,) = problems(f"[reward]\nurl = '{url}'", tmp_path)
    assert line == f'reward.url: got "{url}", expected an address that begins with http:// or https://'


@pytest.mark.parametrize(
    "line",
    ["[learn]\nreference = 99999999999999999999", "[learn]\nliked_weight = 1e308", "[learn]\ndisliked_weight = 1e-320"],
)
def test_numbers_that_the_engine_cannot_compute_with_are_refused(line: str, tmp_path: Path) -> None:
    assert len(problems(line, tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/edged/edged.sock", UnixListen(Path("/run/edged/edged.sock"))),
        ("unix:var/edged.sock", UnixListen(Path("var/edged.sock"))),
        ("tcp:127.0.0.1:8437", TcpListen("127.0.0.1", 8437)),
        ("tcp:[::1]:8437", TcpListen("::1", 8437)),
        ("tcp:box.local:0", TcpListen("box.local", 0)),
    ],
)
def test_an_address_is_parsed_and_written_back_the_same(text: str, address: config.Listen) -> None:
    assert config.parse_listen(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/run/edged.sock", "unix:PATH or tcp:HOST:PORT"),
        ("unix:", "a path after unix:"),
        ("unix:/" + "x" * UNIX_PATH_MAX_BYTES, f"a socket path of at most {UNIX_PATH_MAX_BYTES} bytes"),
        ("tcp:8437", "tcp:HOST:PORT with a host name or address"),
        ("tcp::8437", "tcp:HOST:PORT with a host name or address"),
        ("tcp:http://box:80", "an IPv6 address in brackets"),
        ("tcp:::1:80", "an IPv6 address in brackets"),
        ("tcp:127.0.0.1:65536", "a port from 0 to 65535"),
        ("tcp:127.0.0.1:http", "a port from 0 to 65535"),
        ("tcp:127.0.0.1:²", "a port from 0 to 65535"),
    ],
)
def test_a_bad_address_is_told_with_its_place_in_the_list(text: str, expected: str, tmp_path: Path) -> None:
    (line,) = problems(f"[api]\nlisten = ['unix:/a', {json.dumps(text, ensure_ascii=False)}]", tmp_path)
    assert line.startswith("api.listen[1]: got ")
    assert expected in line


def test_every_bad_address_of_a_list_is_told(tmp_path: Path) -> None:
    found = problems("[api]\nlisten = ['x', 'unix:/a', 7]", tmp_path)
    assert [line.partition(":")[0] for line in found] == ["api.listen[0]", "api.listen[2]"]


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)],
)
def test_only_addresses_that_stay_on_the_machine_are_loopback(host: str, is_loopback: bool) -> None:
    assert TcpListen(host, 1).is_loopback is is_loopback


def _live_keys() -> set[str]:
    return {
        f"{section}.{key}"
        for section, key, info in config.all_keys()
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra["live"]
    }


def test_live_keys_are_those_that_a_running_daemon_can_take_over() -> None:
    live = _live_keys()
    assert {"learn.batch_ratings", "learn.learning_rate", "gate.norm_max", "gate.fluency_prompts"} <= live
    assert {"serve.max_queue", "serve.default_max_tokens", "reward.clip", "api.max_body_bytes", "log.level"} <= live
    fixed = {key for key in live if key.split(".")[0] in {"model", "lora", "placement", "store"}}
    assert fixed == {"placement.keep_warm_s"}
    assert not live & {"learn.enabled", "learn.dtype", "learn.threads", "learn.idle_class", "api.listen", "serve.slots"}


def test_changes_are_told_apart_and_only_the_live_ones_are_taken_over() -> None:
    old = config.load(None)
    new = config.load(None, {"learn.epochs": 5, "serve.slots": 8, "serve.max_queue": 9, "log.format": "json"})
    assert config.live_changes(old, new) == (["serve.max_queue", "learn.epochs"], ["serve.slots", "log.format"])
    merged = config.with_live_changes(old, new)
    assert merged == config.load(None, {"learn.epochs": 5, "serve.max_queue": 9})
    assert config.live_changes(old, old) == ([], [])


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(DOTTED_KEYS) | st.text(max_size=6)


@settings(deadline=None)
@given(st.dictionaries(_names, _values, max_size=6))
@example({"learn.epochs": 10**400, "learn.gamma": 10**400, "api.listen": [["x"]], "learn": {}, "a[b.c[": 1})
def test_random_values_are_settings_or_a_config_error_with_a_line_for_each(values: dict[str, Any]) -> None:
    lines = problems_or_none(None, values)
    assert lines is None or all(": got " in line for line in lines)


@settings(deadline=None)
@given(st.text(alphabet="[]{}=\"'.,#\n\\ _-+:0129aeinftruxT", max_size=60) | st.text(max_size=40))
def test_random_text_is_settings_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "random.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert problems_or_none(file, {}) != ()


@pytest.mark.parametrize(
    ("objectives", "expected"),
    [
        ("{ pp = 1.0 }", f"objectives out of {NAMES}, not 'pp'"),
        ("{ ppo = 0 }", "a weight above 0 and up to 1000 for ppo"),
        ("{ dpo = true }", "a weight above 0 and up to 1000 for dpo"),
        ("{}", f"a table of name = weight with one or more of {NAMES}"),
        ('"ppo"', f"a table of name = weight with one or more of {NAMES}"),
    ],
)
def test_objectives_are_known_names_with_positive_weights(objectives: str, expected: str, tmp_path: Path) -> None:
    (problem,) = problems(f"[learn]\nobjectives = {objectives}\n", tmp_path)
    assert problem.startswith("learn.objectives: got ")
    assert problem.endswith(f"expected {expected}")


def test_objectives_may_be_a_section_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text("[learn.objectives]\nppo = 1\ndpo = 0.3\n")
    assert config.load(file).learn.objectives == {"ppo": 1.0, "dpo": 0.3}


@pytest.mark.parametrize(
    ("objectives", "noted"),
    [({"ppo": 1.0}, 0), ({"grpo": 1.0}, 1), ({"rloo": 1.0, "dpo": 1.0}, 1), ({"grpo": 1.0, "kto": 0.5}, 0)],
)
def test_objectives_that_leave_single_ratings_waiting_are_noted(objectives: dict[str, float], noted: int) -> None:
    found = config.notes(config.load(None, {"learn.objectives": objectives}))
    assert len(found) == noted
    assert all("other ratings wait" in note for note in found)


@pytest.mark.parametrize(
    ("objectives", "source", "noted"),
    [
        ({"kto": 1.0}, "fitted", True),
        ({"kto": 1.0, "sft": 1.0}, "fitted", True),
        ({"kto": 1.0}, "feedback", False),
        ({"kto": 1.0, "grpo": 1.0}, "fitted", False),
        ({"ppo": 1.0}, "fitted", False),
    ],
)
def test_a_judge_beside_kto_alone_is_noted_to_need_rewards_of_both_signs(
    objectives: dict[str, float], source: str, noted: bool
) -> None:
    found = config.notes(config.load(None, {"learn.objectives": objectives, "reward.source": source}))
    assert any("rewards of both signs" in note for note in found) == noted


@pytest.mark.parametrize(
    ("liked", "disliked", "effect"), [(1.0, 1.0, None), (4.0, 3.0, None), (1.0, 2.0, "1 to 1"), (3.0, 1.0, "1.33 to 1")]
)
def test_a_weight_of_kto_that_has_no_effect_is_told(liked: float, disliked: float, effect: str | None) -> None:
    changes = {"learn.liked_weight": liked, "learn.disliked_weight": disliked}
    found = config.notes(config.load(None, changes))
    assert [f"has the effect of {effect}" in note for note in found] == ([] if effect is None else [True])


def test_the_bound_of_ktos_weights_is_the_trainers() -> None:
    from engine.train.objectives.kto import MAX_LIKED_SHARE

    assert config.KTO_RATIO_MAX == MAX_LIKED_SHARE


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['backend = "remote"'], 'serve.url: got "", expected the URL of a server: serve.backend is "remote"'),
        (
            ['backend = "llamacpp"', 'url = "http://box:8000"'],
            'serve.url: got "http://box:8000", expected "": serve.backend is "llamacpp"',
        ),
        (
            ['url = "box:8000"'],
            'serve.url: got "box:8000", expected "", "http://HOST:PORT", "https://HOST:PORT" or "unix:PATH"',
        ),
    ],
)
def test_a_server_and_who_decodes_must_agree(lines: list[str], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text("\n".join(["[serve]", *lines]))
    with pytest.raises(ConfigError) as error:
        config.load(file)
    assert error.value.problems == (problem,)


@pytest.mark.parametrize(
    "url", ["http://box:8000", "https://box", "http://10.0.0.2:30000/prefix", "unix:/run/vllm.sock"]
)
def test_urls_of_servers_are_taken(url: str, tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text(f'[serve]\nurl = "{url}"')
    assert config.load(file).serve.url == url
