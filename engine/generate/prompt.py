"""Requests and probes as token ids: the chat template and the tokeniser, used in one way everywhere."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from engine.generate.backend import Vocabulary
from engine.generate.calls import Syntax
from engine.generate.template import BadTemplate, ChatTemplate
from engine.protocol import ChatMessage, ProbeText, ProbeTokens


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, model: Vocabulary) -> None:
        """Raises BadTemplate if the model's template does not compile."""
        self._model = model
        self._bos = model.special_text("bos")
        self._template: ChatTemplate | None = None
        if model.chat_template is not None:
            self._template = ChatTemplate(model.chat_template, bos=self._bos, eos=model.special_text("eos"))

    @property
    def keeps_turns(self) -> bool:
        """See `ChatTemplate.keeps_turns`; True without a template."""
        return self._template is None or self._template.keeps_turns()

    @functools.cached_property
    def call_syntax(self) -> Syntax | None:
        """See `ChatTemplate.call_syntax`; None without a template."""
        return None if self._template is None else self._template.call_syntax()

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation up to where the assistant speaks; tools: OpenAI's list. Raises BadTemplate."""
        return self.tokens_of(self.laid_out(messages, tools))

    def laid_out(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a conversation up to where the assistant speaks; tools: OpenAI's list. Raises BadTemplate."""
        if self._template is None:
            raise BadTemplate("the model file has no chat template; use /v1/completions with a prompt")
        return self._template.render(messages, tools)

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """Token ids of a conversation that is laid out."""
        # A template that writes BOS itself must not get a second one from the tokeniser.
        writes_bos = bool(self._bos) and text.startswith(self._bos)
        return self._model.tokenise(text, add_special=not writes_bos, parse_special=True)

    def text(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a text to continue as it is."""
        return self._model.tokenise(prompt, add_special=True, parse_special=True)

    def answer(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer that a person wrote, and the token that ends one."""
        return self._model.tokenise(text, add_special=False, parse_special=False) + self._end_of_answer()

    def _end_of_answer(self) -> tuple[int, ...]:
        """The token that the template ends an answer with, which generation stops at too; () if the model has none."""
        if self._template is not None:
            closing = self._model.tokenise(self._template.after_answer(), add_special=False, parse_special=True)
            if closing and closing[0] in self._model.eos_ids:
                return closing[:1]
        end = self._model.end_token()
        return () if end is None else (end,)

    def probe(self, probe: ProbeText) -> ProbeTokens:
        """A canary probe; the completion is the answer's text alone, without an end of sequence. Raises BadTemplate."""
        completion_ids = self._model.tokenise(probe.assistant, add_special=False, parse_special=False)
        return ProbeTokens(prompt_ids=self.user(probe.user), completion_ids=completion_ids)

    def user(self, text: str) -> tuple[int, ...]:
        """Token ids of a user's turn, bare where the model has no template. Raises BadTemplate."""
        if self._template is None:
            return self.text(text)
        return self.chat((ChatMessage(role="user", content=text),))
