"""What can be wrong with an adapter or a base model file.

    AdapterError            every error of this package; `code` is stable and fit for a wire message
    ├── UnreadableAdapter   "adapter_unreadable": missing, truncated, not the format it claims, changed since published
    ├── UnsupportedAdapter  "adapter_unsupported": well formed, but a kind that cannot be served or trained here
    ├── MismatchedAdapter   "adapter_mismatch": does not fit the base model
    ├── NotFiniteAdapter    "not_finite": holds NaN or infinity
    └── BaseModelError      "model_unreadable": the base model's own file cannot be used

Each message names the object, what is wrong and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class AdapterError(ValueError):
    """Raised when an adapter or a base model file cannot be used."""

    code: ClassVar[str] = "adapter_error"


class UnreadableAdapter(AdapterError):
    """Raised when files are missing, truncated, malformed or not those that were published."""

    code = "adapter_unreadable"


class UnsupportedAdapter(AdapterError):
    """Raised when an adapter is well formed but of a kind that the serving engine cannot apply exactly."""

    code = "adapter_unsupported"


class MismatchedAdapter(AdapterError):
    """Raised when an adapter's modules or shapes do not fit the base model."""

    code = "adapter_mismatch"


class NotFiniteAdapter(AdapterError):
    """Raised when a matrix holds NaN or infinity."""

    code = "not_finite"


class BaseModelError(AdapterError):
    """Raised when a base model file is missing, truncated, not GGUF, or of an architecture without support."""

    code = "model_unreadable"
