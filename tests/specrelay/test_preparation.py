import json
from pathlib import Path

import pytest

from cluster.config_errors import PreflightError
from specrelay.preparation import check_vocabularies_agree, vocabulary_of


def saved(folder: Path, tokens: dict[str, int]) -> Path:
    folder.mkdir()
    text = json.dumps({"model": {"vocab": tokens}, "added_tokens": []})
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder


def test_case_18_ids_that_mean_different_tokens_are_refused_with_both_models_and_the_token(tmp_path: Path) -> None:
    small, big = saved(tmp_path / "s", {"a": 0, "b": 1, "c": 2}), saved(tmp_path / "b", {"a": 0, "x": 1, "c": 2})
    with pytest.raises(PreflightError, match=r"small and big disagree at token 1 \('b', 'x'\)"):
        check_vocabularies_agree({"small": small, "big": big})


def test_case_18_more_ids_of_the_same_meaning_agree(tmp_path: Path) -> None:
    small, big = saved(tmp_path / "s", {"a": 0, "b": 1}), saved(tmp_path / "b", {"a": 0, "b": 1, "c": 2})
    check_vocabularies_agree({"small": small, "big": big})
    assert vocabulary_of("small", {"b": 2, "a": 0}).tokens == ["a", "", "b"]


def test_models_of_one_folder_need_no_vocabulary(tmp_path: Path) -> None:
    check_vocabularies_agree({"exit": tmp_path, "target": tmp_path})
