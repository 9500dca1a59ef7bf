"""What a caller is told of each kind of failure."""

from __future__ import annotations

import re
from pathlib import Path

from edged.refusal import Refused, refusal_of
from edged.store.errors import StoreError


def test_a_refusal_is_told_as_it_is() -> None:
    refused = Refused(404, "adapter_not_found", "no published adapter has the version 9")
    assert refusal_of(refused) is refused


def test_a_full_disk_is_something_to_wait_for_and_says_so() -> None:
    told = refusal_of(StoreError("edged.db could not be written: the disk is full; free some space"))
    assert told is not None
    assert (told.status, told.code) == (503, "storage_failed")
    assert "disk is full" in told.message
    assert told.retry_after_s is not None


def test_a_full_disk_is_no_answer_of_the_store_to_a_request() -> None:
    # Parts that catch a refusal would take it for a changed live version.
    assert not isinstance(StoreError("full"), Refused)


def test_a_fault_is_told_to_the_log_only() -> None:
    assert refusal_of(ZeroDivisionError()) is None


def test_every_status_that_is_refused_with_is_listed() -> None:
    package = Path(__file__).parents[2] / "edged"
    used = {
        status for path in package.rglob("*.py") for status in re.findall(r"Refused\(\s*(\d{3}),", path.read_text())
    }
    listed = re.search(r"HTTP status: (.*?)\n", str(Refused.__doc__))
    assert listed is not None
    assert set(re.findall(r"\d{3}", listed[1])) == used
