"""A hundred swaps under sixteen clients: no request fails, and every answer is of the one version that it names.

What the light worker says is a function of prompt, version and seed, so an answer that two versions had made would be
none of those that were heard while nothing else went on. Times are printed, not asserted: `-s` shows them.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from typing import Any

import httpx
import pytest

CLIENTS = 16
SWAPS = 100
PROMPTS = [f"Riddle {number}?" for number in range(8)]
VERSIONS = (1, 2, 3)


def publish(daemon: Any, count: int) -> None:
    for number in range(1, count + 1):
        daemon.rate_some(4)
        daemon.until(lambda expected=number: daemon.status()["learner"]["updates_total"] == expected)
        daemon.until(lambda expected=number: daemon.status()["adapter"]["serving"] == expected)


def ask(client: httpx.Client, prompt: str) -> tuple[int, str]:
    """The version that the answer names, and its text."""
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "seed": 7}
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    whole = answer.json()
    version = int(whole["system_fingerprint"].rpartition("-v")[2])
    assert version == int(answer.headers["x-edged-adapter-version"])
    return version, whole["choices"][0]["message"]["content"]


class Crowd:
    """Clients that ask until they are told to stop, and what they heard."""

    def __init__(self, socket: str) -> None:
        self.heard: list[tuple[str, int, str]] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._socket = socket
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        transport = httpx.HTTPTransport(uds=self._socket)
        with httpx.Client(transport=transport, base_url="http://edged", timeout=120.0) as client:
            while not self._stop.is_set():
                prompt = chance.choice(PROMPTS)
                try:
                    self.heard.append((prompt, *ask(client, prompt)))
                except (httpx.HTTPError, AssertionError, LookupError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")


def change(daemon: Any, path: str) -> float:
    """Milliseconds until the operator is told that new requests run on the version."""
    began = time.perf_counter()
    daemon.client.post(path).raise_for_status()
    return (time.perf_counter() - began) * 1000.0


def told(name: str, times_ms: list[float]) -> str:
    ranked = sorted(times_ms)
    p99 = ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]
    return f"{name}: {len(ranked)}, median {statistics.median(ranked):.1f} ms, p99 {p99:.1f} ms"


@pytest.mark.full
def test_a_hundred_swaps_under_sixteen_clients_fail_no_request_and_mix_no_answer(start_light: Any) -> None:
    daemon = start_light(settings={"learn.batch_ratings": 4}, environment={"EDGED_LIGHT_TOKEN_S": "0.002"})
    publish(daemon, len(VERSIONS))
    said: dict[tuple[str, int], str] = {}
    for version in VERSIONS:
        change(daemon, f"/v1/adapters/{version}/promote")
        daemon.until(lambda expected=version: daemon.status()["adapter"]["serving"] == expected)
        for prompt in PROMPTS:
            named, said[prompt, version] = ask(daemon.client, prompt)
            assert named == version
    swaps_ms, rollbacks_ms, at_rest_ms = [], [], []
    for _ in range(10):
        change(daemon, "/v1/adapters/2/promote")
        change(daemon, "/v1/adapters/3/promote")
        at_rest_ms.append(change(daemon, "/v1/adapters/rollback"))
    chance = random.Random(1)
    with Crowd(str(daemon.state / "edged.sock")) as crowd:
        for number in range(SWAPS):
            live = daemon.status()["adapter"]["version"]
            if number % 4 == 3:
                rollbacks_ms.append(change(daemon, "/v1/adapters/rollback"))
            else:
                other = chance.choice([version for version in VERSIONS if version != live])
                swaps_ms.append(change(daemon, f"/v1/adapters/{other}/promote"))
            time.sleep(0.02)
    print("\n" + told("promoted", swaps_ms), told("rolled back", rollbacks_ms), told("at rest", at_rest_ms), sep="\n")
    assert crowd.failures == []
    assert {version for _, version, _ in crowd.heard} == set(VERSIONS)
    assert [one for one in crowd.heard if said[one[0], one[1]] != one[2]] == []
    episodes = daemon.client.get("/v1/episodes?limit=1000").json()["data"]
    recorded = [(one["messages"][0]["content"], one["adapter_version"], one["text"]) for one in episodes]
    assert [one for one in recorded if one[0] in PROMPTS and said[one[0], one[1]] != one[2]] == []
