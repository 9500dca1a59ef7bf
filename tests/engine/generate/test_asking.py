"""What is said of a prompt that leaves no room."""

from __future__ import annotations

import pytest

from engine.generate.asking import too_long


def test_where_the_setting_is_the_limit_raising_it_is_the_advice() -> None:
    assert too_long("has 5000 tokens", 4096, 8192) == (
        "the prompt has 5000 tokens, the context holds 4096 for prompt and answer together; shorten it or raise "
        "serve.context_tokens"
    )


@pytest.mark.parametrize("context_tokens", [8192, 10240])
def test_where_the_model_is_the_limit_nothing_but_a_shorter_prompt_helps(context_tokens: int) -> None:
    assert too_long("has 9000 tokens", context_tokens, 8192) == (
        "the prompt has 9000 tokens, the model takes 8192 for prompt and answer together; shorten it"
    )
