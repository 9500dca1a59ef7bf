"""A preference and a correction over HTTP, all the way into the job of an update; everything is real but the model."""

from __future__ import annotations

from typing import Any

import msgpack

from engine import protocol

OBJECTIVES = {"ppo": 1.0, "dpo": 0.5, "sft": 0.1}
QUESTION = [{"role": "user", "content": "What is a cat?"}]


def job_of(daemon: Any) -> protocol.TrainJob | None:
    """The job of update 1, once it is in the spool."""
    file = daemon.state / "spool" / "update-1" / protocol.JOB_FILE
    try:
        return protocol.from_map(protocol.TrainJob, msgpack.unpackb(file.read_bytes()))
    except FileNotFoundError:
        return None


def write(daemon: Any) -> dict[str, Any]:
    """Prefer one of two answers, and correct an answer of the model; the answer that was corrected."""
    pair = {"messages": QUESTION, "chosen": "An animal.", "rejected": "A bird.", "user": "ann"}
    daemon.client.post("/v1/preferences", json=pair).raise_for_status()
    answer: dict[str, Any] = daemon.chat(QUESTION[0]["content"])
    correction = {"completion_id": answer["id"], "correction": "A small animal."}
    daemon.client.post("/v1/feedback", json=correction).raise_for_status()
    return answer


def waiting(daemon: Any) -> tuple[int, int]:
    learner = daemon.status()["learner"]
    return learner["pairs"]["waiting"], learner["corrections"]["waiting"]


def test_a_preference_and_a_correction_reach_the_job_of_an_update(start_light: Any) -> None:
    daemon = start_light(settings={"learn.objectives": OBJECTIVES}, environment={"EDGED_LIGHT_TRAIN_S": "1"})
    write(daemon)
    daemon.until(lambda: waiting(daemon) == (1, 1))
    daemon.until(lambda: daemon.client.post("/v1/train").json()["accepted"])
    job = daemon.until(lambda: job_of(daemon))
    preferred, corrected = job.pairs
    assert bytes(preferred.chosen.prompt_ids) == b"<user>What is a cat?\n<assistant>"
    assert bytes(preferred.chosen.completion_ids) == b"An animal.\x02"
    assert bytes(preferred.rejected.completion_ids) == b"A bird.\x02"
    assert corrected.chosen.prompt_ids == corrected.rejected.prompt_ids == preferred.chosen.prompt_ids
    assert bytes(corrected.chosen.completion_ids) == b"A small animal.\x02"
    assert min(corrected.rejected.completion_ids[:-1]) >= 1000  # the engine's own ids of the answer
    assert [answer.completion_ids for answer in job.corrections] == [corrected.chosen.completion_ids]
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    learner = daemon.until(lambda: (now := daemon.status()["learner"])["pairs"]["used"] and now)
    assert learner["last_update"]["verdict"] == "published"
    assert (learner["pairs"], learner["corrections"]) == ({"waiting": 0, "used": 1}, {"waiting": 0, "used": 1})


def test_what_was_written_survives_a_kill_and_goes_with_its_user(start_light: Any) -> None:
    daemon = start_light(settings={"learn.objectives": OBJECTIVES})
    write(daemon)
    daemon.process.kill()
    daemon.process.wait()
    daemon = start_light(settings={"learn.objectives": OBJECTIVES})
    daemon.until(lambda: waiting(daemon) == (1, 1))
    daemon.client.delete("/v1/users/ann").raise_for_status()
    daemon.rate_some(1)  # the learner looks again
    daemon.until(lambda: waiting(daemon) == (0, 1))
