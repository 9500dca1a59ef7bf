"""Token bytes to text as it may be sent: whole characters only, and nothing that a stop string may still take back.

Knows no vocabulary: tokens come as their bytes, control tokens as b"". Pure.

Invariants: the texts returned by `push` and `end` concatenate to `sent`; `sent` holds no stop string and no character
of one that was found; bytes that are no UTF-8 become U+FFFD, an unfinished character at the very end is left out.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_DECODER = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one answer, token by token."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(s for s in stop if s)
        self._decoder = _DECODER(errors="replace")
        self._held = ""
        self._sent: list[str] = []
        self._n_sent = 0
        self.stopped = False

    @property
    def sent(self) -> str:
        """All text that may have been sent so far."""
        return "".join(self._sent)

    @property
    def n_sent(self) -> int:
        """Characters sent."""
        return self._n_sent

    @property
    def n_known(self) -> int:
        """Characters sent or held back: where the next token's text begins."""
        return self._n_sent + len(self._held)

    def push(self, data: bytes) -> str:
        """Take the bytes of one token; the text that can be sent now. Sets `stopped` when a stop string is complete."""
        if self.stopped:
            raise ValueError("the text has stopped")
        self._held += self._decoder.decode(data)
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
        else:
            n_back = self._n_possible_stop()
            cut = len(self._held) - n_back
            text, self._held = self._held[:cut], self._held[cut:]
        return self._send(text)

    def end(self) -> str:
        """The answer ends here without a stop string; the text that was held back."""
        text, self._held = self._held, ""
        return self._send(text)

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
            self._n_sent += len(text)
        return text

    def _n_possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest
