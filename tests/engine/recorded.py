"""What may differ between the embedded engine's replies and SGLang's, and why. docs/engine.md says it to users."""

from __future__ import annotations

#: keys of ours that SGLang's replies do not have
EXTRA_KEYS: set[str] = set()
#: keys of SGLang's replies that ours do not have
MISSING_KEYS: set[str] = set()
#: requests that are answered differently on purpose
ACCEPTED: set[str] = set()
