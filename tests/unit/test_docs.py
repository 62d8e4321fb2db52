"""What the documents show is what the files hold, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from slime.utils.hook_calls import check_path
from slime.utils.hook_table import HOOKS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def include_files():
    spec = importlib.util.spec_from_file_location("include_files", ROOT / "tools" / "include_files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def test_files_shown_in_documents_are_current():
    tool = include_files()
    stale = [page.name for page in tool.documents() if tool.fill(page.read_text()) != page.read_text()]
    assert stale == [], "run make docs"


def test_every_estimator_has_a_page_and_the_code_that_pages_name_exists():
    from slime.algorithms.advantages import ESTIMATORS

    assert {f"algorithms/{name}" for name in ESTIMATORS} <= set(ALGORITHMS)
    for page in (ROOT / "docs" / "algorithms").glob("*.md"):
        for path, name in re.findall(r"`(slime/[\w/]+\.py)(?:: (\w+))?", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
            assert not name or re.search(rf"^def {name}\b", (ROOT / path).read_text(), re.M), (
                f"{page.name}: {path}: {name}"
            )


def documented_metrics() -> set[str]:
    """The names of docs/metrics.md, choices in braces spelt out."""
    page, names = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), set()
    for row in re.findall(r"^\| (`[^|]*) \|", page, re.M):
        for name in re.findall(r"`([^`]+)`", row):
            spelt = [name]
            while any("{" in one for one in spelt):
                spelt = [
                    re.sub(r"\{[^{}]*\}", c, one, count=1)
                    for one in spelt
                    for c in re.search(r"\{([^{}]*)\}", one)[1].split(",")
                ]
            names |= set(spelt)
    return names


def test_metrics_that_are_documented_exist_in_the_code():
    """What a name is put together from stands in the code; that runs write no others is tested on real runs."""
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [*(ROOT / "slime").rglob("*.py"), *(ROOT / "examples" / "hooks").glob("*.py")]
    )

    def is_made(part: str) -> bool:
        if re.search(rf"(?<![a-z]){re.escape(part)}(?![a-z])", code):
            return True
        cuts = [(part[: i + 1], part[i + 1 :]) for i, c in enumerate(part) if c in "_-"]
        return any(
            (re.search(rf"\}}[_-]?{re.escape(end)}(?![a-z])", code) and is_made(start.rstrip("_-")))
            or (re.search(rf"[\"'/_]{re.escape(start)}(?:\{{|[\"'])", code) and is_made(end))
            for start, end in cuts
        )

    fixed = {part for name in documented_metrics() for part in re.split(r"/|[A-Z]{2,}|K\b", name)}
    assert {part for part in fixed if not is_made(part.strip("_-"))} == set()
    assert not is_made("no_such_metric") and not is_made("surplus_prompts")


def test_every_hook_example_is_shown():
    shown = set(re.findall(r"<!-- file: examples/hooks/(\S+) -->", (ROOT / "docs" / "hooks.md").read_text()))
    assert shown == {path.name for path in (ROOT / "examples" / "hooks").glob("*.py")}


@pytest.mark.parametrize("option", HOOKS)
def test_every_hook_has_a_file_in_the_documents_that_can_be_called(option):
    """The commands that the page shows name functions that the trainer and the rollout take; the e2e tests run them."""
    text = (ROOT / "docs" / "hooks.md").read_text()
    paths = re.findall(rf"--{option.replace('_', '-')} (examples/hooks/\w+\.py(?::\w+)?)", text)
    assert paths
    for path in paths:
        check_path(str(ROOT / path), option)


ALGORITHMS = [f"algorithms/{page.stem}" for page in sorted((ROOT / "docs" / "algorithms").glob("*.md"))]


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "hooks",
        "metrics",
        "troubleshooting",
        *sorted(set(ALGORITHMS) - {"algorithms/vectors", "algorithms/README"}),
    ],
)
def test_flags_in_the_documents_exist(name):
    from slime.config.parse import build_parser

    known = set(build_parser()._option_string_actions)
    text = (ROOT / "docs" / f"{name}.md").read_text()
    named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text) if flag != "--help"}
    assert named and named - known == set()
