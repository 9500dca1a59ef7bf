"""The command line from outside: exit codes, what goes to stdout and stderr, and what scripts can read."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from edged.cli.later import NOT_YET

CLIENT_VERBS = (
    ("status",), ("chat", "hi"), ("rate", "chatcmpl-1", "up"), ("train",), ("pause",), ("resume",),
    ("adapters", "list"), ("adapters", "show", "1"), ("adapters", "diff", "1", "2"), ("adapters", "promote", "1"),
    ("adapters", "rollback"), ("adapters", "pin", "1"), ("adapters", "unpin"), ("adapters", "keep", "1"),
    ("adapters", "import", "."), ("adapters", "export", "1"), ("keys", "create", "app"), ("keys", "list"),
    ("keys", "revoke", "key-1"),
)  # fmt: skip


def test_no_daemon_is_exit_code_69_and_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "edged", "status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 69
    assert done.stdout == ""
    assert "edged run" in done.stderr


@pytest.mark.parametrize("verb", CLIENT_VERBS, ids=" ".join)
def test_every_client_verb_takes_connect(verb: tuple[str, ...], cli) -> None:
    done = cli(*verb, "--connect", "unix:nowhere.sock")
    assert done.returncode == 69, done.stderr
    assert "nowhere.sock" in done.stderr


@pytest.mark.parametrize("verb", NOT_YET)
def test_a_verb_that_comes_later_says_so_in_one_line(verb: str, cli) -> None:
    done = cli(verb, "something", "--option", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "does not exist yet" in done.stderr


def test_usage_errors_are_exit_code_2(cli) -> None:
    assert cli("rate", "chatcmpl-1", "7").returncode == 2
    assert cli("rate", "chatcmpl-1", "up", "--resaon", "typo").returncode == 2
    assert cli("no-such-verb").returncode == 2
    assert cli("adapters", "promote").returncode == 2
    assert cli("keys", "create", "app", "--scope", "root").returncode == 2
    for address in ("ftp://box", "http://", "http://[::1", "http://box:http", "http://box:99999"):
        assert cli("status", "--connect", address).returncode == 2


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    command = [sys.executable, "-P", "-m", "edged", "check-config"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("edged: the output cannot be written: No space left on device")
    assert "Traceback" not in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['edged', '--help']\n"
        "from edged.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'llama_cpp', 'transformers', 'numpy', 'fastapi', 'httpx', 'apsw', 'matplotlib', 'rich'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.strip() == "[]"


def test_status_is_json_for_scripts_and_text_for_people(light_daemon, cli) -> None:
    body = json.loads(cli("status", "--json", "--connect", light_daemon.connect).stdout)
    assert body["learner"]["ratings_until_update"] == 5
    text = cli("status", "--connect", light_daemon.connect).stdout
    assert "v3" in text
    assert "5 more ratings until the next update" in text


def test_the_environment_names_the_daemon(light_daemon, cli) -> None:
    assert cli("status", env={"EDGED_CONNECT": light_daemon.connect}).returncode == 0
    assert cli("status", env={"EDGED_CONNECT": light_daemon.url}).returncode == 0


def test_chat_streams_the_answer_to_stdout_alone(light_daemon, cli) -> None:
    done = cli("chat", "hi", "--connect", light_daemon.connect, "--temperature", "0.5", "--max-tokens", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Hello there.\n"
    assert done.stderr == f"rate it: edged rate {light_daemon.book.episodes[0].completion_id} up|down\n"
    assert (light_daemon.answers.asked[0].temperature, light_daemon.answers.asked[0].max_tokens) == (0.5, 9)


def test_an_interactive_chat_remembers_and_rates(light_daemon, cli) -> None:
    done = cli("chat", "--connect", light_daemon.connect, input="+\nhi\n+\nand you?\n-\n")
    assert done.returncode == 0, done.stderr
    assert "nothing to rate yet" in done.stdout
    assert [row.rating for row in light_daemon.book.rows] == [1.0, -1.0]
    assert [m["role"] for m in light_daemon.answers.asked[1].messages] == ["user", "assistant", "user"]


def test_a_chat_turn_that_is_refused_does_not_end_the_chat(light_daemon, cli) -> None:
    light_daemon.answers.fails_after = 1
    done = cli("chat", "--connect", light_daemon.connect, input="hi\n")
    assert done.returncode == 0
    assert "the engine died" in done.stderr


def test_rate_stores_the_rating_and_says_when_it_replaces_one(light_daemon, cli) -> None:
    connect = ("--connect", light_daemon.connect)
    completion = json.loads(cli("chat", "hi", "--json", *connect).stdout)
    first = cli("rate", completion["id"], "down", "--reason", "too short", "--correction", "Hello!", *connect)
    assert first.returncode == 0, first.stderr
    assert "replaces" not in first.stdout
    assert "replaces" in cli("rate", completion["id"], "0.5", *connect).stdout
    assert [(row.rating, row.reason) for row in light_daemon.book.rows] == [(-1.0, "too short"), (0.5, None)]


@pytest.mark.parametrize("number", ["-1", "-0.5", "-.25"])
def test_a_rating_may_be_a_negative_number(number: str, light_daemon, cli) -> None:
    completion = json.loads(cli("chat", "hi", "--json", "--connect", light_daemon.connect).stdout)
    done = cli("rate", completion["id"], number, "--reason", "wrong", "--connect", light_daemon.connect)
    assert done.returncode == 0, done.stderr
    assert [(row.rating, row.reason) for row in light_daemon.book.rows] == [(float(number), "wrong")]


def test_an_unknown_completion_is_exit_code_1_with_the_daemons_words(light_daemon, cli) -> None:
    done = cli("rate", "chatcmpl-unknown", "up", "--connect", light_daemon.connect)
    assert done.returncode == 1
    assert "chatcmpl-unknown" in done.stderr


def test_train_says_why_there_is_no_update(light_daemon, cli) -> None:
    done = cli("train", "--connect", light_daemon.connect)
    assert done.returncode == 1
    assert "there are no new ratings" in done.stderr


def test_pause_and_resume_reach_the_learner(light_daemon, cli) -> None:
    assert cli("pause", "--connect", light_daemon.connect).returncode == 0
    assert light_daemon.control.learner["state"] == "paused"
    assert cli("resume", "--connect", light_daemon.connect).returncode == 0
    assert light_daemon.control.learner["state"] == "collecting"


def test_adapters_are_listed_shown_and_compared(light_daemon, cli) -> None:
    connect = ("--connect", light_daemon.connect)
    listed = cli("adapters", "list", *connect).stdout
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["v0", "v1", "v2", "*"]
    assert "v2" in cli("adapters", "show", "2", *connect).stdout or cli("adapters", "show", "2", *connect).stdout
    assert json.loads(cli("adapters", "show", "2", "--json", *connect).stdout)["version"] == 2
    assert cli("adapters", "show", "9", *connect).returncode == 1
    assert "1.5000" in cli("adapters", "diff", "1", "2", *connect).stdout


def test_promote_with_if_live_changes_nothing_when_another_is_live(light_daemon, cli) -> None:
    refused = cli("adapters", "promote", "1", "--if-live", "2", "--connect", light_daemon.connect)
    assert refused.returncode == 1
    assert light_daemon.control.live.version == 3
    assert cli("adapters", "promote", "1", "--if-live", "3", "--connect", light_daemon.connect).returncode == 0
    assert light_daemon.control.live.version == 1


def test_pin_unpin_keep_and_rollback(light_daemon, cli) -> None:
    connect = ("--connect", light_daemon.connect)
    assert cli("adapters", "pin", "2", *connect).returncode == 0
    assert (light_daemon.control.live.version, light_daemon.control.live.pinned) == (2, True)
    assert cli("adapters", "unpin", *connect).returncode == 0
    assert (light_daemon.control.live.version, light_daemon.control.live.pinned) == (2, False)
    assert cli("adapters", "keep", "1", *connect).returncode == 0
    assert light_daemon.control.lineage[1].kept
    assert cli("adapters", "keep", "1", "--drop", *connect).returncode == 0
    assert not light_daemon.control.lineage[1].kept
    assert "v1 is live" in cli("adapters", "rollback", *connect).stdout


def test_a_refused_import_is_exit_code_1_with_the_reason(light_daemon, cli, tmp_path: Path) -> None:
    done = cli("adapters", "import", str(tmp_path), "--connect", light_daemon.connect)
    assert done.returncode == 1
    assert "not finite" in done.stderr
    assert cli("adapters", "import", "nowhere", "--connect", light_daemon.connect).returncode == 1


def test_export_writes_a_whole_tar_or_nothing(light_daemon, cli, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    done = cli("adapters", "export", "2", "-o", "out.tar", "--connect", light_daemon.connect)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert any(name.endswith("adapter_config.json") for name in tar.getnames())
    assert cli("adapters", "export", "0", "--connect", light_daemon.connect).returncode == 1
    assert not (tmp_path / "edged-v0.tar").exists()
    assert not list(tmp_path.glob("*.part"))


def test_a_key_is_made_needed_listed_and_revoked(light_daemon, cli) -> None:
    unix, tcp = ("--connect", light_daemon.connect), ("--connect", light_daemon.url)
    assert cli("status", *tcp).returncode == 0
    secret = cli("keys", "create", "app", "--scope", "infer", "--scope", "admin", *unix).stdout.strip()
    assert cli("status", *tcp).returncode == 1
    assert "--api-key" in cli("status", *tcp).stderr
    assert cli("status", *tcp, "--api-key", secret).returncode == 0
    assert cli("status", *tcp, env={"EDGED_API_KEY": secret}).returncode == 0
    listed = json.loads(cli("keys", "list", "--json", *unix).stdout)["data"]
    assert secret not in cli("keys", "list", *unix).stdout
    assert cli("keys", "revoke", listed[0]["id"], *unix).returncode == 0
    assert cli("status", *unix, "--json").returncode == 0


def test_check_config_reports_every_problem_at_once(cli, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[learn]\nepochs = 0\nnonsense = 1\n[serve]\nslots = 'many'\n")
    done = cli("check-config", "--config", "bad.toml")
    assert done.returncode == 78
    for key in ("learn.epochs", "learn.nonsense", "serve.slots"):
        assert key in done.stderr
    problems = json.loads(cli("check-config", "--config", "bad.toml", "--json").stdout)["problems"]
    assert len(problems) == 3
    assert cli("run", "--config", "bad.toml").returncode == 78


def test_check_config_takes_the_file_as_an_argument_too(cli, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text("[learn]\nepochs = 1\n")
    (tmp_path / "bad.toml").write_text("[learn]\nepochs = 0\n")
    assert "good.toml: no problems" in cli("check-config", "good.toml").stdout
    (tmp_path / "groups.toml").write_text("[learn]\nobjectives = { grpo = 1.0 }\n")
    assert "note: learn.objectives: grpo learns" in cli("check-config", "groups.toml").stdout
    (tmp_path / "gone.toml").write_text('[reward]\nsource = "classifier"\nclassifier = "/nowhere"\n')
    gone = cli("check-config", "gone.toml")
    assert (gone.returncode, "reward.classifier: '/nowhere' is no folder" in gone.stderr) == (78, True)
    assert cli("check-config", "bad.toml").returncode == 78
    assert cli("check-config", "nowhere.toml").returncode == 78
    assert cli("check-config", "good.toml", "--config", "good.toml").returncode == 2


def test_check_config_checks_the_flags_too(cli) -> None:
    assert cli("check-config").returncode == 0
    assert cli("check-config", "--listen", "tcp:nowhere").returncode == 78


def test_models_pull_stays_offline_when_told_so(cli) -> None:
    done = cli("models", "pull", "owner/name", env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE" in done.stderr
    assert cli("models", "pull", "no-owner").returncode == 2
