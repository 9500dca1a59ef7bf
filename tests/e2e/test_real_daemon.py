"""The daemon on the real model: official clients, adapters in and out, bad input, and kills."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from adapters.llamacpp_format import read_base_shape
from adapters.peft import save_peft
from adapters.weights import AdapterWeights
from edged.base_model import find_model
from edged.bench.provenance import TOP_LOGPROBS, Trace, bound, deviation, trace_of
from edged.demo.prompts import TRAINING
from edged.machine import train_dtype
from tests.load import Load, check_nothing_lost

# The first test of a session waits for the learning runs.
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1800)]

ASKED = TRAINING[:16]
TELLING_NATS = 0.25  # other batches alone were seen to change the mean over an answer by up to 0.13
KILLS = 3
KILL_WITHIN_S = 12.0  # of the first acknowledged rating: long enough for an update to run
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def daemon(start_real: Callable[..., Any], learning_run: Any) -> Iterator[Any]:
    """The daemon that has learned, started again on its folder, on a Unix socket and on TCP."""
    socket = f"unix:{learning_run.state}/edged.sock"
    running = start_real(
        "honest", state=learning_run.state, arguments=("--listen", socket, "--listen", "tcp:127.0.0.1:0")
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def url(daemon: Any) -> str:
    """Where the daemon listens on TCP."""
    return "http://127.0.0.1:" + re.findall(r"listening on tcp:127\.0\.0\.1:(\d+)", daemon.log.read_text())[-1]


def test_a_daemon_that_was_stopped_serves_what_it_had_learned(daemon: Any, learning_run: Any) -> None:
    assert daemon.status()["adapter"]["version"] == max(answer.version for answer in learning_run.after)


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_the_official_client_chats_and_streams(daemon: Any, url: str, over: str) -> None:
    transport = httpx.HTTPTransport(uds=str(daemon.state / "edged.sock")) if over == "unix" else httpx.HTTPTransport()
    base_url = "http://localhost/v1" if over == "unix" else f"{url}/v1"
    with openai.OpenAI(
        base_url=base_url, api_key="none", http_client=httpx.Client(transport=transport, timeout=120)
    ) as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, temperature=0, logprobs=True
        )  # type: ignore[call-overload]
        assert whole.choices[0].message.content
        # A sampled end of the answer is a token without text, which is counted and not listed.
        assert whole.usage.completion_tokens - len(whole.choices[0].logprobs.content) in (0, 1)
        pieces = list(
            client.chat.completions.create(
                model="default",
                messages=QUESTION,  # type: ignore[arg-type]
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        assert pieces[-1].usage is not None
        with pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model="gpt-9", messages=QUESTION)  # type: ignore[arg-type]
        assert refused.value.code == "model_not_found"


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(daemon: Any) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 4}
    answer = daemon.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert re.search(r"\d{4,}", answer.json()["error"]["message"])
    assert daemon.chat()["id"]


def test_an_exported_adapter_loads_in_peft_and_comes_back_as_a_candidate(daemon: Any, tmp_path: Path) -> None:
    version = daemon.status()["adapter"]["version"]
    folder = export(daemon, version, tmp_path)
    check = (
        "import sys; from peft import PeftConfig; from safetensors.numpy import load_file;"
        "c = PeftConfig.from_pretrained(sys.argv[1]); t = load_file(sys.argv[1] + '/adapter_model.safetensors');"
        "print(c.peft_type.value, c.r, len(t))"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", check, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == ["LORA", "8", "140"]  # ten blocks of seven matrices, A and B
    brought = daemon.client.post("/v1/adapters/import", json={"folder": str(folder)})
    assert brought.status_code == 200, brought.text
    adapter = brought.json()
    assert (adapter["version"], adapter["origin"], adapter["state"]) == (version + 1, "imported", "published")
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{version + 1}")
    back = daemon.client.post("/v1/adapters/rollback", json={"if_live": version + 1})
    assert back.json()["version"] == version
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{version}")
    stale = daemon.client.post("/v1/adapters/rollback", json={"if_live": version + 1})
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "live_changed")


def test_an_adapter_full_of_nan_is_refused_and_never_served(daemon: Any, tmp_path: Path) -> None:
    live = daemon.status()["adapter"]["version"]
    folder = export(daemon, live, tmp_path)
    spoil(folder, lambda tensor: np.full_like(tensor, np.nan))
    refused = daemon.client.post("/v1/adapters/import", json={"folder": str(folder)})
    assert refused.status_code == 400
    assert "finite" in refused.json()["error"]["message"]
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{live}")


def test_an_adapter_that_ruins_the_language_is_refused_with_its_reason(daemon: Any, tmp_path: Path) -> None:
    live = daemon.status()["adapter"]["version"]
    folder = export(daemon, live, tmp_path)
    chance = np.random.default_rng(0)
    spoil(folder, lambda tensor: chance.normal(0, 0.1, tensor.shape).astype(np.float32))
    answer = daemon.client.post("/v1/adapters/import", json={"folder": str(folder)})
    assert answer.status_code == 200, answer.text
    assert answer.json()["state"] == "refused"
    assert answer.json()["reason"]
    promoted = daemon.client.post(f"/v1/adapters/{answer.json()['version']}/promote", json={})
    assert (promoted.status_code, promoted.json()["error"]["code"]) == (409, "adapter_refused")
    assert daemon.chat()["system_fingerprint"].endswith(f"-v{live}")


def test_a_model_file_of_another_kind_is_refused_before_anything_starts(tmp_path: Path, packaged_model: Path) -> None:
    whole = packaged_model.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    command = [sys.executable, "-m", "edged", "run", "--state-dir", str(tmp_path / "state"), "--model", str(cut)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 78
    assert "cut.gguf" in refused.stderr


def test_the_trainer_killed_in_the_middle_trains_again_to_the_same_bytes(daemon: Any, tmp_path: Path) -> None:
    updates = daemon.status()["learner"]["updates_total"]
    rate_a_batch(daemon)
    spool = daemon.state / "spool"
    job = daemon.until(lambda: next(iter(spool.glob("update-*/job.msgpack")), None))
    shutil.copytree(job.parent, tmp_path / "job", ignore=shutil.ignore_patterns("out*"))
    pid = daemon.until(lambda: daemon.status()["learner"]["progress"] and daemon.worker_pid("train"))
    os.kill(pid, signal.SIGKILL)
    assert daemon.chat()["choices"][0]["finish_reason"] in ("stop", "length")
    # Taken while the gate looks at it: what is refused afterwards must be the same bytes too.
    daemon.until(lambda: (job.parent / "out" / "adapter").is_dir())
    shutil.copytree(job.parent / "out", tmp_path / "made")
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == updates + 1)
    assert daemon.status()["learner"]["last_update"]["verdict"] in ("published", "refused")
    again = train_alone(tmp_path / "job", daemon).parent
    compared = [path.relative_to(again) for folder in ("adapter", "checkpoint") for path in (again / folder).iterdir()]
    assert len(compared) > 4
    for name in compared:
        same = (again / name).read_bytes() == (tmp_path / "made" / name).read_bytes()
        assert same, name  # the bytes themselves are megabytes that pytest would take minutes to compare line by line


def test_twenty_swaps_under_load_fail_no_request_and_mix_no_answer(daemon: Any, tmp_path: Path) -> None:
    before_test = daemon.status()["adapter"]["version"]
    live = bring_a_stranger(daemon, tmp_path)
    known: dict[int, dict[str, Trace]] = {}
    bounds = []
    for version in (0, live):
        assert daemon.client.post(f"/v1/adapters/{version}/promote", json={}).json()["version"] == version
        known[version] = {prompt: greedy(daemon, prompt).trace for prompt in ASKED}
        with ThreadPoolExecutor(len(ASKED)) as pool:
            crowd = {said.prompt: said.trace for said in pool.map(lambda prompt: greedy(daemon, prompt), ASKED)}
        bounds.append(bound(known[version], crowd))
    apart = {prompt: distance(known[0][prompt], known[live][prompt]) for prompt in ASKED}
    telling = sorted(ASKED, key=lambda prompt: -apart[prompt])[:3]
    assert apart[telling[-1]] > TELLING_NATS, apart

    stop = threading.Event()
    answers: list[Greedy] = []

    def load(first: int) -> None:
        for turn in itertools.count(first):
            if stop.is_set():
                return
            answers.append(greedy(daemon, telling[turn % len(telling)]))

    threads = [threading.Thread(target=load, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for swap in range(20):
        wanted, before = (0, live)[swap % 2], len(answers)
        assert daemon.client.post(f"/v1/adapters/{wanted}/promote", json={}).json()["version"] == wanted
        daemon.until(lambda wanted=wanted, before=before: wanted in {said.version for said in answers[before:]})
    stop.set()
    for thread in threads:
        thread.join()
    assert {said.status for said in answers} == {200}
    assert {said.version for said in answers} == {0, live}
    recorded = {e["completion_id"]: e["adapter_version"] for e in episodes(daemon)}
    for said in answers:
        assert said.version == recorded[said.completion_id]
        # Names come from one place; the log-probabilities say which weights computed them.
        by_version = {version: deviation(said.trace, traces[said.prompt]) for version, traces in known.items()}
        assert by_version[said.version] == min(by_version.values()), (said.prompt, said.version, by_version)
        assert by_version[said.version] <= max(bounds)
    assert daemon.client.post(f"/v1/adapters/{before_test}/promote", json={}).status_code == 200


def distance(one: Trace, other: Trace) -> float:
    """By how much two versions differ, in nats a token, seen from the one that sees less of it."""
    return min(deviation(one, other), deviation(other, one))


def bring_a_stranger(daemon: Any, tmp_path: Path) -> int:
    """An adapter of noise that changes what is said about as much as the gate lets pass; the version that it got.

    What one machine learns from a hundred ratings may be too little to tell its answers from the base's."""
    base = read_base_shape(find_model("smollm2-135m"))
    chance = np.random.default_rng(0)
    matrices = {}
    for module in base.top_modules(10):
        n_out, n_in = base.module_shape(module)
        drawn = [chance.normal(0, 0.05, shape).astype(np.float32) for shape in ((8, n_in), (n_out, 8))]
        matrices[module] = (drawn[0], drawn[1])
    folder = tmp_path / "stranger"
    folder.mkdir()
    save_peft(folder, AdapterWeights(base=base, rank=8, alpha=16.0, matrices=matrices), "SmolLM2-135M")
    brought = daemon.client.post("/v1/adapters/import", json={"folder": str(folder)}).json()
    assert brought["state"] == "published", brought
    return int(brought["version"])


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A greedy answer with its log-probabilities."""

    status: int
    prompt: str
    completion_id: str
    version: int
    trace: Trace


def greedy(daemon: Any, prompt: str) -> Greedy:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
    }
    answer = daemon.client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return Greedy(answer.status_code, prompt, "", -1, ())
    completion = answer.json()
    version = int(completion["system_fingerprint"].rpartition("-v")[2])
    trace = trace_of(completion["choices"][0]["logprobs"]["content"])
    return Greedy(200, prompt, completion["id"], version, trace)


def test_three_kills_of_the_real_daemon_under_rating_load_lose_nothing_and_double_nothing(
    start_real: Callable[..., Any], learning_run: Any
) -> None:
    chance = random.Random(7)
    acknowledged: list[str] = []
    answered: list[str] = []
    running = start_real("killed", cache=learning_run.state / "cache")
    for kill in range(KILLS):
        with Load(running.state / "edged.sock", kill) as load:
            running.until(lambda load=load: load.acknowledged)
            time.sleep(chance.uniform(0.0, KILL_WITHIN_S))
            running.process.kill()
            running.process.wait()
        acknowledged += load.acknowledged
        answered += load.episodes
        running = start_real("killed", state=running.state)
        check_nothing_lost(running, acknowledged, answered[-50:])
        live = running.status()["adapter"]["version"]
        assert running.chat(max_tokens=4)["system_fingerprint"].endswith(f"-v{live}")
    assert running.stop() == 0


def rate_a_batch(daemon: Any) -> None:
    missing = daemon.status()["learner"]["ratings_until_update"]
    for index in range(missing):
        answer = daemon.chat(f"Tell me about the number {index}.", max_tokens=24, temperature=0.7)
        daemon.rate(answer["id"], 1.0 if index % 2 else -0.5)


def export(daemon: Any, version: int, tmp_path: Path) -> Path:
    """The adapter folder as a client gets it, over the command line."""
    tar = tmp_path / "adapter.tar"
    command = [sys.executable, "-m", "edged", "adapters", "export", str(version), "--output", str(tar)]
    subprocess.run([*command, "--connect", f"unix:{daemon.state}/edged.sock"], check=True, timeout=120)
    with tarfile.open(tar) as archive:
        archive.extractall(tmp_path, filter="data")
    return next(tmp_path.glob("*/adapter_config.json")).parent


def spoil(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: change(tensor) for name, tensor in load_file(path).items()}, path)


def episodes(daemon: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    more = True
    while more:
        after = found[-1]["id"] if found else 0
        page = daemon.client.get("/v1/episodes", params={"after": after, "limit": 500}).json()
        found += page["data"]
        more = page["has_more"]
    return found


def train_alone(job: Path, daemon: Any) -> Path:
    """Run a copy of a job in a process of its own, as a trainer would; the adapter folder that it made."""
    program = (
        "import sys; from pathlib import Path; import msgpack, torch\n"
        "from engine.models import load_base; from engine.protocol import TrainJob, from_map\n"
        "from engine.train.job import run_job; from engine.train.lanes import Lanes\n"
        "from engine.train.scorer import Scorer\n"
        "folder, model, cache, dtype = Path(sys.argv[1]), *sys.argv[2:]\n"
        "job = from_map(TrainJob, msgpack.unpackb((folder / 'job.msgpack').read_bytes()))\n"
        "torch.use_deterministic_algorithms(True); device = torch.device('cpu')\n"
        "base = load_base(model, job.base_sha256, cache, dtype, 'cpu')\n"
        "run_job(folder, Scorer(base, job.lora.layers, Lanes(job.threads, device)), job.base_sha256, lambda *_: None)\n"
    )
    arguments = [str(job), str(find_model("smollm2-135m")), str(daemon.state / "cache"), train_dtype("auto", "cpu")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=300)
    assert json.loads((job / "out" / "adapter" / "manifest.json").read_text())["version"]
    return job / "out" / "adapter"
