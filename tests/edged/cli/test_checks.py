"""The checks of `edged doctor`, on this machine and on described ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edged.cli import checks
from edged.cli.doctor import finding_text
from edged.settings import ModelSection, PlacementSection, ServeSection, Settings
from engine import placement


def test_an_old_python_fails_and_a_new_one_does_not() -> None:
    assert checks.check_python((3, 10, 12)).level == "fail"
    assert checks.check_python((3, 13, 0)).level == "ok"


def test_a_sqlite_with_the_wal_reset_bug_fails() -> None:
    assert checks.check_sqlite("3.40.1").level == "fail"
    assert checks.check_sqlite("3.51.2").level == "fail"
    assert checks.check_sqlite("3.51.3").level == "ok"
    assert checks.check_sqlite().level == "ok"


def test_the_packaged_model_is_found_and_described() -> None:
    finding = checks.check_model("smollm2-135m")
    assert finding.level == "ok"
    assert "30 blocks" in finding.found


def test_a_missing_or_broken_model_fails_with_advice(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    for path in ("nowhere.gguf", str(broken), str(tmp_path)):
        finding = checks.check_model(path)
        assert finding.level == "fail"
        assert finding.advice


def test_sampling_is_really_tried() -> None:
    finding = checks.check_decoding(Settings())
    assert finding.level == "ok", finding
    assert "tokens/s" in finding.found
    assert finding.found.startswith("llamacpp: ")
    assert checks.check_decoding(Settings(model=ModelSection(path="nowhere.gguf"))).level == "warn"


def test_a_backend_that_does_not_read_the_model_fails_with_advice() -> None:
    finding = checks.check_decoding(Settings(serve=ServeSection(backend="transformers")))
    assert (finding.level, finding.advice) == ("fail", 'set it to "auto"')


def test_a_cpu_without_bfloat16_is_a_warning() -> None:
    assert checks.check_cpu("flags\t\t: fpu avx2 fma\n").level == "warn"
    assert checks.check_cpu("flags\t\t: fpu avx2 avx512_bf16\n") == checks.Finding(
        name="cpu", level="ok", found="avx2, avx512_bf16"
    )
    assert checks.check_cpu("Features\t: asimd bf16\n").level == "ok"


def test_one_core_and_little_memory_are_warnings() -> None:
    assert checks.check_cores(1).level == "warn"
    assert checks.check_memory("MemAvailable:  1000000 kB\n").level == "warn"
    assert checks.check_memory("MemAvailable:  8000000 kB\n").level == "ok"
    assert checks.check_memory("").level == "warn"


@pytest.mark.parametrize(
    ("serves", "trains", "level", "words"),
    [
        (True, True, "ok", "llama.cpp and torch can use them"),
        (True, False, "warn", "this torch cannot use them"),
        (False, True, "warn", "this llama.cpp was built without CUDA"),
        (False, False, "warn", "this llama.cpp was built without CUDA, and this torch cannot use them"),
    ],
)
def test_a_gpu_is_of_use_where_both_engines_can_use_it(serves: bool, trains: bool, level: str, words: str) -> None:
    finding = checks.judge_gpu("NVIDIA L4, 23034 MiB", serves=serves, trains=trains)
    assert (finding.level, finding.found) == (level, f"NVIDIA L4, 23034 MiB; {words}")
    assert bool(finding.advice) == (level == "warn")


def test_the_plan_is_told_in_bytes_for_every_role() -> None:
    box = (placement.Device(name="cpu", kind="cpu", total_bytes=10**10, free_bytes=10**10),)
    findings = checks.check_placement(Settings(), box)
    assert {(finding.name, finding.level) for finding in findings} == {("placement", "ok")}
    assert findings[0].found.startswith("timeslice ")
    assert findings[0].advice == ""
    assert findings[1].found.startswith("device 0, cpu: ")
    assert findings[-1].found == "the adapter: rank 8, on the topmost 10 of 30 blocks"
    for role in ("serve", "actor", "critic", "reference"):
        assert any(finding.found.startswith(f"- {role}: ") and " bytes: " in finding.found for finding in findings)


def test_a_plan_is_told_with_what_is_new_when_idle_and_what_of_it_is_not_carried_out() -> None:
    cards = tuple(
        placement.Device(name=f"cuda:{number}", kind="cuda", total_bytes=10**11, free_bytes=10**11)
        for number in range(4)
    )
    findings = checks.check_placement(Settings(placement=PlacementSection(serve_device="cuda")), cards)
    assert findings[0].found.startswith("data_parallel ")
    assert findings[0].advice == ""
    assert findings[-2].found == "the adapter: rank 8, on all 30 blocks"
    assert findings[-1].found.startswith("while nobody asks: data_parallel ")
    assert findings[-1].advice == "planned only, the plan above stays: the serve worker does not leave its card"


def test_what_does_not_fit_is_told_with_what_would() -> None:
    box = (placement.Device(name="cpu", kind="cpu", total_bytes=10**9, free_bytes=1_400_000_000),)
    (finding,) = checks.check_placement(Settings(), box)
    assert finding.level == "warn"
    assert "too few" in finding.found
    assert finding.advice.startswith("this would fit: ")
    (pinned,) = checks.check_placement(Settings(placement=PlacementSection(critic=(4,))), box)
    assert (pinned.level, pinned.found) == ("fail", "placement.critic: there is no device 4; there are 0 (cpu)")


def test_nothing_is_planned_for_a_model_that_is_not_there() -> None:
    (finding,) = checks.check_placement(Settings(model=ModelSection(path="nowhere.gguf")), ())
    assert finding.level == "warn"


def test_the_disk_is_measured_where_the_state_folder_would_be_and_left_as_it_was(tmp_path: Path) -> None:
    findings = checks.check_disk(tmp_path / "not" / "there" / "yet")
    assert [finding.name for finding in findings] == ["state folder", "disk sync"]
    assert list(tmp_path.iterdir()) == []


def test_a_socket_nobody_listens_on_is_a_warning(tmp_path: Path, light_daemon) -> None:
    assert checks.check_socket(tmp_path / "none.sock").level == "ok"
    assert "a daemon listens" in checks.check_socket(light_daemon.socket).found
    (tmp_path / "dead.sock").touch()
    assert checks.check_socket(tmp_path / "dead.sock").level == "warn"


def test_a_finding_shows_what_to_do_on_its_own_line() -> None:
    finding = checks.Finding(name="disk sync", level="warn", found="80 ms", advice="use a faster disk")
    assert finding_text(finding).splitlines()[1].strip() == "-> use a faster disk"
    assert "\n" not in finding_text(dataclasses.replace(finding, advice=""))
