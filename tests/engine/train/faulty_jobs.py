"""Run a job with a fault at each point at which it touches the disk; print what became of it as JSON.

`python -m tests.engine.train.faulty_jobs MODEL TEMPLATE`, where TEMPLATE is a job folder. Alone in a process, because
it forks, and lanes of other tests would be missing in the children.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

from engine.models import load_folder
from engine.train.job import JobFailed, run_job
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer
from tests import faults
from tests.engine.train.tiny import BASE_SHA256, LORA, hash_tree, silent


def main(model: Path, template: Path) -> None:
    torch.set_num_threads(1)
    base = load_folder(model, "float32", "cpu")

    def run(folder: Path) -> None:
        lanes = Lanes(1, torch.device("cpu"))
        try:
            run_job(folder, Scorer(base, LORA.layers, lanes), BASE_SHA256, silent)
        except JobFailed as failure:
            raise OSError(failure.code) from failure
        finally:
            lanes.close()

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(template, template.parent / name))

    undisturbed, cases = fresh("undisturbed"), []
    points = faults.events(undisturbed, lambda: run(undisturbed))
    for number in range(len(points)):
        # Only a file takes space that a full disk has not.
        for fault in ("killed", "full") if points[number] == "open" else ("killed",):
            folder = fresh(f"{fault}-{number}")
            code = faults.fault_at(number, fault, folder, lambda folder=folder: run(folder))
            left = sorted(path.name for path in folder.iterdir())
            # What a full disk leaves is the job as it was, so there is nothing new to run again.
            again = fault == "killed" and faults.fault_at(len(points), fault, folder, lambda folder=folder: run(folder))
            cases.append(
                {
                    "point": points[number],
                    "fault": fault,
                    "code": code,
                    "left": left,
                    "replayed": fault == "full" or (again == faults.DONE and same(undisturbed, folder)),
                }
            )
    print(json.dumps(cases))


def same(one: Path, other: Path) -> bool:
    """Whether two finished jobs have the same adapter and checkpoint, byte for byte."""
    trees = [hash_tree(folder / "out") for folder in (one, other)]
    for tree in trees:
        del tree["result.msgpack"]  # holds the seconds it took
    return trees[0] == trees[1] and bool(trees[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
