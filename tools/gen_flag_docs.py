"""Write docs/reference/flags.md from the flag declarations. A test fails while the file is older than the flags."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference" / "flags.md"


def main() -> None:
    """Render and write the reference."""
    sys.path.insert(0, str(ROOT))
    from slime.config.docs import render

    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(render())
    print(f"wrote {TARGET}", file=sys.stderr)


if __name__ == "__main__":
    main()
