"""How plausible the base's own short answers are to it: what learned short answers are compared with.

Samples the base on the held-out questions, as the learning test does, keeps the answers that are short and finished,
and prints their number, mean log-probability and standard error. A learning run's own sample of the base has a dozen
such answers, whose mean is uncertain by half of what the test allows; this one has as many as asked for.

    python tests/bench/base_fluency.py --samples 24
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from adapters.base_file import base_sha256
from edged import machine
from edged.base_model import find_model
from edged.demo.people import words_of
from edged.demo.prompts import HELD_OUT
from engine.flow import Answer, Flow, Trainer
from engine.models import load_base
from engine.protocol import AdapterRef, Sampling
from engine.train.lanes import Lanes
from engine.train.scorer import Scorer

SHORT_WORDS = 36  # as in tests/e2e/test_learning.py
SAMPLING = Sampling(temperature=0.7, max_tokens=64, seed=1)
BASE = AdapterRef(version=0, folder=None)


def short_answers(model: Path, folder: Path, samples: int) -> list[Answer]:
    """`samples` answers to each held-out question by the base, those that are short and finished."""
    flow = Flow(model=model, folder=folder, reward=lambda answers: [0.0] * len(answers), sampling=SAMPLING)
    with Trainer(flow) as trainer:
        answers = [one for _ in range(samples) for one in trainer.sample(HELD_OUT)]
    return [one for one in answers if len(words_of(one.text)) <= SHORT_WORDS and one.finish_reason == "stop"]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=24)
    samples = parser.parse_args().samples
    model = find_model("smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        short = short_answers(model, Path(folder), samples)
        dtype = machine.train_dtype("auto", "cpu")
        base = load_base(str(model), base_sha256(model), str(Path(folder) / "cache"), dtype, "cpu")
        lanes = Lanes(machine.threads(0), torch.device("cpu"))
        scores = Scorer(base, 10, lanes).score([one.episode for one in short], BASE, lambda: None)
        lanes.close()
    logprobs = [score.reference_logprob for score in scores if score.reference_logprob is not None]
    error = statistics.stdev(logprobs) / len(logprobs) ** 0.5
    total = samples * len(HELD_OUT)
    print(f"{len(logprobs)} of {total} answers are short; {statistics.mean(logprobs):.3f} nats a token, SE {error:.3f}")


if __name__ == "__main__":
    main()
