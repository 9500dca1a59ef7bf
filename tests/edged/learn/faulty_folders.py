"""Write and publish with a fault at each point at which the disk is touched; print what became of it as JSON.

`python -m tests.edged.learn.faulty_folders TEMPLATE`, where TEMPLATE is a state folder with a trained update 1. Alone
in a process, because it forks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack

from edged.learn.folders import Folders
from engine import protocol
from tests import faults

BASE_SHA256 = "b" * 64


def publish(root: Path) -> None:
    folders = Folders(root, BASE_SHA256)
    out = folders.job(1) / protocol.OUT_FOLDER
    folders.publish(folders.candidate(1, 1), out / "checkpoint", 1)


def write_job(root: Path) -> None:
    path = root / "job.msgpack"
    job = protocol.from_map(protocol.TrainJob, msgpack.unpackb(path.read_bytes()))
    Folders(root, BASE_SHA256).write_job(2, job)


def write_current(root: Path) -> None:
    Folders(root, BASE_SHA256).write_current(0)


def state(root: Path) -> dict[str, str]:
    """What a start would find: everything but leftovers, which it clears away."""
    folders = Folders(root, BASE_SHA256)
    folders.prepare([1, 2])
    assert all(folders.complaint_about(version) is None for version in folders.versions())
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(template: Path) -> None:
    cases = []
    steps: tuple[Callable[[Path], None], ...] = (publish, write_job, write_current)
    for step in steps:

        def fresh(name: str, step: Callable[[Path], None] = step) -> Path:
            return Path(shutil.copytree(template, template.parent / f"{step.__name__}-{name}"))

        before, undisturbed = fresh("before"), fresh("undisturbed")
        old = state(before)
        points = faults.events(undisturbed, lambda step=step, root=undisturbed: step(root))
        new = state(undisturbed)
        for number in range(len(points)):
            for fault in ("killed", "full"):
                root = fresh(f"{fault}-{number}")
                code = faults.fault_at(number, fault, root, lambda step=step, root=root: step(root))
                half_written = [path.name for path in root.rglob("*.tmp")]
                found = state(root)
                step(root)
                cases.append(
                    {
                        "step": step.__name__,
                        "fault": fault,
                        "code": code,
                        "whole": all(found[name] in (old.get(name), new.get(name)) for name in found),
                        "old": found == old and not half_written,
                        "finished": state(root) == new,
                    }
                )
    print(json.dumps(cases))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
