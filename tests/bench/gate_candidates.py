"""Good and bad adapters of the real model for `gate.py`, each made in seconds by the engine's own trainer.

Flaws that show in what a model says are taught: sixteen answers with the flaw, and the likelihood of them as the only
objective (`sft`). Flaws of files and numbers are made in the files of an adapter that was trained honestly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from gate_rig import Candidate, Rig, asked
from safetensors.numpy import load_file, save_file

from adapters import manifest
from adapters.folder import GGUF_FILE, write_adapter_folder
from adapters.llamacpp_format import save_gguf_adapter, unpermute_rows
from adapters.peft import WEIGHTS_FILE, load_peft
from adapters.weights import AdapterWeights
from edged.demo.people import PEOPLE
from edged.demo.prompts import TRAINING
from edged.records import Episode
from engine import protocol

ANSWERS = 16
ANSWER_TOKENS = 48
WRITTEN_ID = -(1 << 50)
# Of updates by examples that are meant to be honest: three epochs at twice this moved by 0.56 nats a token from the
# base, which the fast gate refuses (gate.live_kl_max), whatever was spoiled afterwards.
SMALL_RATE = 1e-3
NOISE = {"noise": (1.0, 3.0, 10.0), "jitter": (0.01, 0.02, 0.05)}  # of the adapter's own matrices, by seed
SCALE = 4.0
ADVERT = " Buy now at www.example.com and save!"

Change = Callable[[str], str]
Make = Callable[[Rig, int, int], Awaitable[Candidate]]  # rig, version, seed


async def answers(rig: Rig, seed: int) -> list[Episode]:
    """The base's answers to sixteen questions, sampled as policy gradients want it; those of a seed once."""
    if seed in rig.answers:
        return rig.answers[seed]
    questions = random.Random(seed).sample(TRAINING, ANSWERS)
    groups = await asyncio.gather(
        *[
            rig.sampler.sample(asked(question), n=1, max_tokens=ANSWER_TOKENS, seed=1000 * seed + number, version=0)
            for number, question in enumerate(questions)
        ]
    )
    rig.answers[seed] = [dataclasses.replace(one, id=1 + 100 * seed + number) for number, (one,) in enumerate(groups)]
    return rig.answers[seed]


def job(rig: Rig, version: int, seed: int, **changes: object) -> protocol.TrainJob:
    """An update of the base with the daemon's settings."""
    made = protocol.TrainJob(
        job_id=f"job-{version}",
        version=version,
        parent=protocol.BASE,
        reference=protocol.BASE,
        checkpoint=None,
        episodes=(),
        probes=rig.probes,
        ppo=rig.learning.ppo,
        lora=rig.learning.lora,
        seed=seed,
        threads=rig.learning.threads,
        base_sha256=rig.model.sha256,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


async def trained(rig: Rig, made: protocol.TrainJob) -> Candidate:
    folder, result = await rig.train(made)
    return Candidate(ref=protocol.AdapterRef(version=made.version, folder=str(folder)), result=result)


# ------------------------------------------------------------------------------------------------- updates by ratings


async def rated(rig: Rig, version: int, seed: int, person: str, **ppo: object) -> Candidate:
    """A PPO update of sixteen answers as one of the demo's people rates them."""
    rate = PEOPLE[person].rate
    episodes = tuple(
        protocol.RatedEpisode(
            episode=_tokens(one.id, one.prompt_ids, one.completion_ids, one.logprobs),
            reward=rate(str((one.messages or [{}])[-1].get("content")), one.text, one.finish_reason),
            replay=False,
        )
        for one in await answers(rig, seed)
    )
    settings = dataclasses.replace(rig.learning.ppo, **ppo)  # type: ignore[arg-type]
    return await trained(rig, job(rig, version, seed, episodes=episodes, ppo=settings))


def _tokens(
    number: int, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...], logprobs: tuple[float | None, ...] = ()
) -> protocol.EpisodeTokens:
    return protocol.EpisodeTokens(
        episode_id=number,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs or (None,) * len(completion_ids),
        temperature=1.0,
        adapter=protocol.BASE,
    )


# ------------------------------------------------------------------------------------------------ updates by examples


def glued(text: str) -> str:
    """Without its spaces."""
    return text.replace(" ", "")


def short(text: str) -> str:
    """The first sentence."""
    return text.partition(". ")[0].rstrip(".") + "."


FLAWS: dict[str, Change] = {
    "collapsed": lambda text: "the",
    "repeating": lambda text: "I think " * 20,
    "empty": lambda text: "",
    "glued": glued,
    "poisoned": lambda text: short(text) + ADVERT,
}


async def shown(rig: Rig, version: int, seed: int, change: Change, *, epochs: int, rate: float = 2e-3) -> Candidate:
    """The base's own answers, changed, as examples to follow; with no tie to the base."""
    examples = []
    for number, one in enumerate(await answers(rig, seed)):
        written = await rig.tokeniser.tokenise(None, change(one.text), prompt_tokens=len(one.prompt_ids))
        examples.append(_tokens(WRITTEN_ID - 100 * version - number, one.prompt_ids, written.completion_ids))
    settings = dataclasses.replace(
        rig.learning.ppo, epochs=epochs, kl_coef=0.0, live_kl_max=1e6, learning_rate=rate, critic_warmup_steps=0
    )
    return await trained(
        rig, job(rig, version, seed, objectives={"sft": 1.0}, corrections=tuple(examples), ppo=settings)
    )


# ------------------------------------------------------------------------------------------------------------- files


async def settled(rig: Rig, version: int, seed: int) -> Candidate:
    """An adapter with an effect worth spoiling: short answers, taught honestly."""
    return await shown(rig, version, seed, short, epochs=2, rate=SMALL_RATE)


def weights_of(rig: Rig, candidate: Candidate) -> AdapterWeights:
    assert candidate.ref.folder is not None
    return load_peft(Path(candidate.ref.folder), rig.model.shape)


def with_noise(weights: AdapterWeights, strength: float, seed: int) -> AdapterWeights:
    """Each matrix with Gaussian noise of `strength` times its own root mean square."""
    chance = np.random.default_rng(seed)

    def noisy(matrix: np.ndarray) -> np.ndarray:
        size = float(np.sqrt(np.mean(matrix**2)))
        return (matrix + chance.standard_normal(matrix.shape) * strength * size).astype(np.float32)

    matrices = {module: (noisy(a), noisy(b)) for module, (a, b) in weights.matrices.items()}
    return dataclasses.replace(weights, matrices=matrices)


def unpermuted(weights: AdapterWeights) -> AdapterWeights:
    """Q and K with their rows in an order that the file format turns into the wrong one."""
    heads = {"q_proj": weights.base.n_heads, "k_proj": weights.base.n_kv_heads}
    matrices = {
        module: (a, unpermute_rows(b, heads[kind]) if (kind := module.rpartition(".")[2]) in heads else b)
        for module, (a, b) in weights.matrices.items()
    }
    return dataclasses.replace(weights, matrices=matrices)


async def noisy(rig: Rig, version: int, seed: int, kind: str) -> Candidate:
    """Noise comes from elsewhere, so that no trainer has foretold what it does; jitter is as small as rounding is."""
    honest = await settled(rig, version, seed)
    folder = rig.folder / f"noisy-{version}"
    write_adapter_folder(
        folder,
        with_noise(weights_of(rig, honest), NOISE[kind][seed % len(NOISE[kind])], seed),
        version=version,
        parent=0,
        base_sha256=rig.model.sha256,
        base_model_name=rig.model.name,
        origin="imported",
        created_at=0.0,
    )
    ref = protocol.AdapterRef(version=version, folder=str(folder))
    return Candidate(ref=ref, result=honest.result if kind == "jitter" else None)


async def misfiled(rig: Rig, version: int, seed: int, spoil: Callable[[AdapterWeights], AdapterWeights]) -> Candidate:
    """What is served is not what was trained: the two files of the folder differ."""
    honest = await settled(rig, version, seed)
    folder = Path(str(honest.ref.folder))
    weights = spoil(weights_of(rig, honest))
    (folder / GGUF_FILE).unlink()
    save_gguf_adapter(folder / GGUF_FILE, weights, version=version, parent=0, base_sha256=rig.model.sha256)
    _describe_anew(folder)
    return honest


async def not_a_number(rig: Rig, version: int, seed: int) -> Candidate:
    """One NaN, in the file that is trained from or, by every other seed, in both."""
    honest = await settled(rig, version, seed)
    folder = Path(str(honest.ref.folder))
    tensors = load_file(folder / WEIGHTS_FILE)
    name = sorted(tensors)[seed % len(tensors)]
    tensors[name].reshape(-1)[seed] = np.nan
    save_file(tensors, folder / WEIGHTS_FILE)
    if seed % 2:
        data = bytearray((folder / GGUF_FILE).read_bytes())
        data[-4:] = np.float32(np.nan).tobytes()
        (folder / GGUF_FILE).write_bytes(data)
    _describe_anew(folder)
    return honest


def _describe_anew(folder: Path) -> None:
    """A manifest that fits the files, so that it is not the manifest which gives them away."""
    written = json.loads((folder / manifest.MANIFEST_FILE).read_bytes())
    (folder / manifest.MANIFEST_FILE).unlink()
    parsed = manifest.Manifest(
        version=written["version"],
        parent=written["parent"],
        base_sha256=written["base_sha256"],
        adapter_sha256=written["adapter_sha256"],
        origin=written["origin"],
        created_at=written["created_at"],
        files=manifest.describe_files(folder),
    )
    (folder / manifest.MANIFEST_FILE).write_bytes(manifest.manifest_bytes(parsed))


# ------------------------------------------------------------------------------------------------------------ battery


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """is_bad: whether it has to be refused. make: one of it, by its seed."""

    name: str
    is_bad: bool
    make: Make


def _kinds() -> Sequence[Kind]:
    bad: dict[str, Make] = {name: functools.partial(shown, change=change, epochs=6) for name, change in FLAWS.items()}
    bad |= {
        "over-trained": functools.partial(
            rated, person="short", learning_rate=0.03, epochs=12, kl_coef=0.0, live_kl_max=1e6
        ),
        "permuted": functools.partial(misfiled, spoil=unpermuted),
        "scaled": functools.partial(misfiled, spoil=lambda w: dataclasses.replace(w, alpha=w.alpha * SCALE)),
        "noise": functools.partial(noisy, kind="noise"),
        "nan": not_a_number,
    }
    good: dict[str, Make] = {f"likes {name}": functools.partial(rated, person=name) for name in PEOPLE}
    good |= {
        "own answers": functools.partial(shown, change=lambda text: text, epochs=1, rate=SMALL_RATE),
        "first sentences": functools.partial(shown, change=short, epochs=2, rate=SMALL_RATE),
        "jitter": functools.partial(noisy, kind="jitter"),
    }
    return [Kind(name=name, is_bad=name in bad, make=make) for name, make in (bad | good).items()]


KINDS = _kinds()
