"""Check at start that the installed packages are the ones this package was made for.

Invariants: the floors come from the installed metadata of slime itself, so there is one list of them; all misfits are
named at once, each with the version found and the version needed. A checkout that was never installed has no floors:
there the main packages only have to be present. It does not import the packages it checks.
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from collections.abc import Callable, Iterable

#: What a run needs in any case, where no metadata says more.
MAIN_PACKAGES = ["torch", "ray", "megatron-core", "transformers"]


def check_dependencies(extra: str = "") -> None:
    """Raise RuntimeError naming every missing or unfit package.

    Args:
        extra: an extra of the package ("gpu", "agent", "dev") whose requirements are checked too.
    """
    problems = find_problems(requirements_of_slime() or MAIN_PACKAGES, extra)
    if problems:
        raise RuntimeError(
            f"the packages of {sys.executable} do not fit: {'; '.join(problems)}. Repair with `make install` and "
            "`source .venv/bin/activate`, or with `pip install -e .`"
        )


def requirements_of_slime() -> list[str]:
    """Return the requirement lines in the metadata of the installed package, [] when it is not installed."""
    try:
        return metadata.requires("slime") or []
    except metadata.PackageNotFoundError:
        return []


def find_problems(
    requirements: Iterable[str], extra: str = "", version_of: Callable[[str], str] = metadata.version
) -> list[str]:
    """Return one text per requirement line that the installed packages do not meet."""
    requirements = list(requirements)
    if not requirements:
        return []
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging is not installed"]
    problems = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        problem = _problem(requirement, version_of)
        if problem:
            problems.append(problem)
    return problems


def _problem(requirement, version_of: Callable[[str], str]) -> str | None:
    needed = str(requirement.specifier) or "any version"
    try:
        found = version_of(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed, needed {needed}"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} is {found}, needed {needed}"
