"""Show files in the documents: fill the block after each `<!-- file: PATH -->` line of docs/*.md with the file's text, and the
one after `<!-- signatures -->` with the table of hooks.

A test fails while a document shows an older text than the file has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- file: (?P<path>\S+) -->\n(?:```\w*\n.*?\n```\n)?", re.S)
SIGNATURES = re.compile(r"(?<=<!-- signatures -->\n).*?(?=<!-- end of signatures -->)", re.S)
LANGUAGES = {".py": "python", ".sh": "bash", ".jsonl": "json"}


def main() -> None:
    """Rewrite the documents that changed."""
    for document in documents():
        filled = fill(document.read_text(encoding="utf-8"))
        if filled != document.read_text(encoding="utf-8"):
            document.write_text(filled, encoding="utf-8")
            print(f"wrote {document}", file=sys.stderr)


def documents() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def fill(text: str) -> str:
    """Return the document with every marked file's current text."""

    def block(match: re.Match) -> str:
        path = ROOT / match["path"]
        content = path.read_text(encoding="utf-8").rstrip("\n")
        return f"<!-- file: {match['path']} -->\n```{LANGUAGES[path.suffix]}\n{content}\n```\n"

    return SIGNATURES.sub(lambda _: signatures(), MARK.sub(block, text))


def signatures() -> str:
    """Return a table of every hook flag and how it is called."""
    sys.path.insert(0, str(ROOT))
    from slime.utils.hook_table import HOOKS

    rows = [f"| `--{option.replace('_', '-')}` | `{hook.text}` |\n" for option, hook in HOOKS.items()]
    return "| flag | called as -> returns |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    main()
