"""Chat templates out of model files."""

from __future__ import annotations

import pytest

from engine.generate.template import BadTemplate, ChatTemplate
from engine.protocol import ChatMessage

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% if (messages[0]['role'] == 'user') %}{{ bos_token }}{{ messages[0]['content'] | trim }}"
    "{% else %}{{ raise_exception('Conversation must start with a user turn') }}{% endif %}"
)


# As of Qwen3: what was thought in earlier turns is left out.
FORGETFUL = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'].split('</think>')[-1].lstrip() if m['role'] == 'assistant' else m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def test_messages_are_laid_out_up_to_where_the_assistant_speaks() -> None:
    assert template(CHATML).render([user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_at_hand() -> None:
    assert template(STRICT).render([user(" Hi ")]) == "<s>Hi"


def test_a_template_that_refuses_the_roles_is_quoted_with_them() -> None:
    with pytest.raises(BadTemplate, match=r"roles system: Conversation must start with a user turn"):
        template(STRICT).render([ChatMessage(role="system", content="x")])


def test_no_messages_are_refused() -> None:
    with pytest.raises(BadTemplate, match="at least one"):
        template(CHATML).render([])


def test_a_broken_template_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(BadTemplate, match="does not compile"):
        template("{% for %}")


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(BadTemplate, match="unsafe"):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([user("x")])


def test_json_keeps_characters_that_html_would_escape() -> None:
    assert template("{{ messages[0].content | tojson }}").render([user("<é>")]) == '"<é>"'


def test_what_ends_an_answer_is_read_off_the_template() -> None:
    assert template(CHATML).after_answer() == "<|im_end|>\n"


def test_a_template_that_shows_no_assistants_turn_ends_none() -> None:
    assert template(STRICT).after_answer() == ""
    assert template("{{ raise_exception('never') }}").after_answer() == ""


def test_t_tok_4_a_template_that_rewrites_earlier_turns_is_found_out() -> None:
    assert template(CHATML).keeps_turns()
    assert not template(FORGETFUL).keeps_turns()
    assert template("{{ raise_exception('never') }}").keeps_turns(), "there is nothing to rewrite"
