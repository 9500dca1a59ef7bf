"""A reward source behind HTTP: it is sent `{"items": [...]}` and answers `{"rewards": [number or null, ...]}`.

One POST and one 200 a batch. The items are `engine.score.source.as_map`, the rewards come in their order. The service
is not trusted: time and size of its answer are bounded, redirects are not followed, proxies of the environment are not
used, compressed answers are not unpacked. A request is not repeated; the answers of a failed batch have a reason
instead of a reward.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from engine.protocol import HttpSource, JudgeItem
from engine.score import verdict
from engine.score.source import as_map
from engine.score.verdict import SourceFailed, Verdict

ANSWER_BASE_BYTES = 16 * 1024
ANSWER_ITEM_BYTES = 256  # many times what a number takes, however it is written
SHOWN_BYTES = 120  # of an answer that is an error, for people


class RewardService:
    """Judges by asking the service at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tls = httpx.create_ssl_context(trust_env=False)  # reads certificates, so it is made once

    def judge(self, items: Sequence[JudgeItem], clip: float, deadline: float) -> Verdict:
        """What the service says. Raises SourceFailed."""
        body = json.dumps({"items": [as_map(item) for item in items]}).encode()
        answer = self._post(body, ANSWER_BASE_BYTES + ANSWER_ITEM_BYTES * len(items), deadline)
        return verdict.check(parse_rewards(answer), len(items), clip)

    def _post(self, body: bytes, max_bytes: int, deadline: float) -> bytes:
        left_s = max(0.001, deadline - time.monotonic())
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        try:
            with (
                httpx.Client(verify=self._tls, trust_env=False, follow_redirects=False) as client,
                client.stream("POST", self._url, content=body, headers=headers, timeout=left_s) as response,
            ):
                return self._read(response, max_bytes, deadline)
        except httpx.TimeoutException as error:
            raise SourceFailed("judge_timeout", f"{self._url} did not answer within {left_s:.3g} s") from error
        except httpx.HTTPError as error:
            raise SourceFailed("judge_unreachable", f"{self._url}: {error or type(error).__name__}") from error

    def _read(self, response: httpx.Response, max_bytes: int, deadline: float) -> bytes:
        """The body, as far as it is allowed. httpx bounds each read, and this the sum of them."""
        if "content-encoding" in response.headers:
            raise SourceFailed("judge_bad_answer", f"{self._url} sent a compressed answer, which was not asked for")
        read = bytearray()
        for chunk in response.iter_raw():
            read += chunk
            if len(read) > max_bytes:
                raise SourceFailed("judge_answer_too_large", f"{self._url} sent more than {max_bytes} bytes")
            if time.monotonic() > deadline:
                raise SourceFailed("judge_timeout", f"{self._url} was still sending when its time was over")
            if response.status_code != 200 and len(read) >= SHOWN_BYTES:
                break
        if response.status_code != 200:
            shown = bytes(read[:SHOWN_BYTES]).decode("utf-8", "replace")
            raise SourceFailed("judge_http_status", f"{self._url} answered {response.status_code}: {shown}")
        return bytes(read)


def open_http(wanted: HttpSource) -> RewardService:
    """The service; it is first asked when there is something to judge, so it need not run yet."""
    return RewardService(wanted.url)


def parse_rewards(answer: bytes) -> Any:
    """The value of "rewards" in the service's answer, unchecked. Raises SourceFailed."""
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise SourceFailed("judge_bad_answer", f"the reward service's answer is not JSON: {error}") from error
    if not isinstance(document, dict) or "rewards" not in document:
        raise SourceFailed("judge_bad_answer", 'the reward service\'s answer is no object with a key "rewards"')
    return document["rewards"]
