"""Scores against transformers' own log-probabilities, and what the cache may and may not change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from engine.fault import EngineFault
from engine.protocol import AdapterRef, ProbeTokens
from engine.train import scorer as scorer_module
from engine.train.scorer import Scorer
from tests.engine.train.conftest import MakeEpisodes
from tests.engine.train.tiny import BASE, peer_logprobs, publish_lora, random_lora, silent


def test_t_lp_2_measures_are_those_of_transformers_at_the_sampling_temperature(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_peer: Any
) -> None:
    episodes = [rated.episode for rated in sample_episodes(5)]
    for episode, measure in zip(episodes, scorer.measure(episodes, [BASE] * 5, silent), strict=True):
        ids, n = episode.prompt_ids + episode.completion_ids, len(episode.completion_ids)
        torch.testing.assert_close(measure.scaled, peer_logprobs(tiny_peer, ids, n, 0.7), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(measure.raw, peer_logprobs(tiny_peer, ids, n, 1.0), rtol=1e-4, atol=1e-4)


def test_a_score_holds_means_over_the_right_tokens(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_folder: Path, tiny_peer: Any, tmp_path: Path
) -> None:
    adapter = publish_lora(tmp_path / "v3", random_lora(scorer.base), 3)
    (rated,) = sample_episodes(1, adapter=adapter)
    n = len(rated.episode.completion_ids)
    ending = dataclasses.replace(
        rated.episode, completion_ids=(*rated.episode.completion_ids[:-1], 2), logprobs=(-1.0,) * n
    )
    (score,) = scorer.score([ending], BASE, silent)
    ids = ending.prompt_ids + ending.completion_ids
    plain = transformers.LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, str(adapter.folder)).eval()
    own, reference = peer_logprobs(adapted, ids, n, 1.0), peer_logprobs(tiny_peer, ids, n, 1.0)
    sampled = peer_logprobs(adapted, ids, n, 0.7)
    assert score.n_tokens == n
    assert score.reference_logprob == pytest.approx(float(reference[:-1].mean()), abs=1e-4)  # the last token is EOS
    assert score.kl == pytest.approx(float((own - reference).mean()), abs=1e-4)
    assert score.engine_gap == pytest.approx(float((sampled + 1.0).abs().mean()), abs=1e-4)


def test_what_cannot_be_known_of_an_episode_is_none(scorer: Scorer, sample_episodes: MakeEpisodes) -> None:
    (rated,) = sample_episodes(1)
    n = len(rated.episode.completion_ids)
    change = dataclasses.replace
    only_eos = change(rated.episode, episode_id=71, completion_ids=(2,), logprobs=(-1.0,))
    nothing = change(rated.episode, episode_id=72, completion_ids=(), logprobs=())
    unknown = change(rated.episode, episode_id=73, logprobs=(None,) * n)
    greedy = change(rated.episode, episode_id=74, temperature=0.0, logprobs=(0.0,) * n)
    scores = scorer.score([only_eos, nothing, unknown, greedy], BASE, silent)
    assert scores[0].reference_logprob is None
    assert (scores[1].n_tokens, scores[1].reference_logprob, scores[1].kl, scores[1].engine_gap) == (0, None, 0.0, None)
    assert scores[2].engine_gap is None
    assert scores[3].engine_gap is None


def test_forgetting_changes_no_number(
    scorer: Scorer, sample_episodes: MakeEpisodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = [rated.episode for rated in sample_episodes(6)]
    before = scorer.score(episodes, BASE, silent)
    monkeypatch.setattr(scorer_module, "CACHE_BYTES", 1)
    others = [rated.episode for rated in sample_episodes(3, seed=5)]
    scorer.score(others, BASE, silent)
    assert set(scorer._known) == {other.episode_id for other in others}, "those in use are kept, the others forgotten"
    assert scorer.score(episodes, BASE, silent) == before


def test_an_episode_number_that_comes_with_other_tokens_is_another_episode(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    first, second = (rated.episode for rated in sample_episodes(2))
    expected = scorer.measure([second], [BASE], silent)[0].raw
    scorer.measure([first], [BASE], silent)
    disguised = dataclasses.replace(second, episode_id=first.episode_id)
    assert torch.equal(scorer.measure([disguised], [BASE], silent)[0].raw, expected)


def test_an_episode_number_that_comes_with_its_tokens_divided_elsewhere_is_another_episode(
    scorer: Scorer, sample_episodes: MakeEpisodes
) -> None:
    (rated,) = sample_episodes(1)
    ids = rated.episode.prompt_ids + rated.episode.completion_ids
    for n_prompt in range(1, len(ids)):
        divided = dataclasses.replace(
            rated.episode, prompt_ids=ids[:n_prompt], completion_ids=ids[n_prompt:], logprobs=()
        )
        fresh = dataclasses.replace(divided, episode_id=900 + n_prompt)
        found, expected = (scorer.measure([one], [BASE], silent)[0] for one in (divided, fresh))
        assert found.raw.shape == (len(ids) - n_prompt,)
        assert torch.equal(found.raw, expected.raw)
        assert torch.equal(scorer.features(divided), scorer.features(fresh))


def test_an_adapter_below_the_usual_layers_is_scored_too(
    scorer: Scorer, sample_episodes: MakeEpisodes, tiny_folder: Path, tmp_path: Path
) -> None:
    adapter = publish_lora(tmp_path / "v4", random_lora(scorer.base, layers=0), 4)
    (rated,) = sample_episodes(1)
    plain = transformers.LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, str(adapter.folder)).eval()
    ids, n = rated.episode.prompt_ids + rated.episode.completion_ids, len(rated.episode.completion_ids)
    (found,) = scorer.measure([rated.episode], [adapter], silent)
    torch.testing.assert_close(found.raw, peer_logprobs(adapted, ids, n, 1.0), rtol=1e-4, atol=1e-4)


def test_an_adapter_whose_bytes_have_changed_is_not_scored_under(
    scorer: Scorer, sample_episodes: MakeEpisodes, tmp_path: Path
) -> None:
    adapter = publish_lora(tmp_path / "v4", random_lora(scorer.base, layers=0), 4)
    file = tmp_path / "v4" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x10  # still numbers, and finite
    file.write_bytes(data)
    with pytest.raises(EngineFault) as caught:
        scorer.measure([sample_episodes(1)[0].episode], [adapter], silent)
    assert caught.value.code == "adapter_unreadable"


def test_probes_scored_again_give_the_same_and_only_the_newest_are_kept(scorer: Scorer) -> None:
    first = [ProbeTokens(prompt_ids=(3, 4), completion_ids=(5, 6)), ProbeTokens(prompt_ids=(7,), completion_ids=(8,))]
    once = scorer.measure_probes(first, None, silent)
    assert scorer.measure_probes(first, None, silent) == once
    scorer.measure_probes(first[:1], None, silent)
    assert len(scorer._probe_trunks) == 1


def test_an_answers_probes_do_not_depend_on_what_they_are_packed_with(scorer: Scorer) -> None:
    probes = [
        ProbeTokens(prompt_ids=(3, 4, *range(20, 20 + n)), completion_ids=tuple(range(1, 2 + n))) for n in range(1, 9)
    ]
    lora = random_lora(scorer.base, layers=2)
    together = scorer.measure_probes(probes, lora, silent)
    alone = [scorer.measure_probes([probe], lora, silent)[0] for probe in probes]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_the_canary_of_a_version_that_was_just_trained_is_not_measured_again(
    scorer: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = [ProbeTokens(prompt_ids=(3, 4), completion_ids=(5, 6))]
    adapter = publish_lora(tmp_path / "v4", random_lora(scorer.base, layers=2), 4)
    measured = scorer.canary(adapter, probes, silent)
    assert measured == scorer.measure_probes(probes, scorer.adapter(adapter), silent)
    assert measured != scorer.canary(AdapterRef(version=0, folder=None), probes, silent)
    scorer.keep_canary(4, probes, [(0.0,)])
    scorer.micro_batch_tokens //= 2  # packed in another way, so it is measured
    assert scorer.canary(adapter, probes, silent) == measured
    scorer.keep_canary(4, probes, measured)
    monkeypatch.setattr(scorer, "measure_probes", lambda *_: pytest.fail("measured again"))
    assert scorer.canary(adapter, probes, silent) == measured


def test_probes_are_scored_at_temperature_one(scorer: Scorer, tiny_peer: Any) -> None:
    probe = ProbeTokens(prompt_ids=(4, 5, 6), completion_ids=(7, 8))
    (found,) = scorer.measure_probes([probe], None, silent)
    assert found == pytest.approx(peer_logprobs(tiny_peer, (4, 5, 6, 7, 8), 2, 1.0).tolist(), abs=1e-4)
