import importlib.metadata
import sys

import pytest

from slime.utils import dependencies


def fake_versions(**versions):
    def version_of(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version_of


def test_this_environment_fits():
    dependencies.check_dependencies()


def test_every_misfit_is_named_with_found_and_needed():
    problems = dependencies.find_problems(
        ["ray>=2.40", "psutil>=5.9", "torch>=2.6", "rich"],
        version_of=fake_versions(ray="2.30.1", torch="2.13.0+cpu", rich="1"),
    )
    assert problems == ["ray is 2.30.1, needed >=2.40", "psutil is not installed, needed >=5.9"]


def test_a_ceiling_and_a_prerelease_are_compared():
    versions = fake_versions(a="0.17.0", b="2.0rc1")
    assert dependencies.find_problems(["a<0.17,>=0.16.1", "b>=1.9"], version_of=versions) == [
        "a is 0.17.0, needed <0.17,>=0.16.1"
    ]


def test_requirements_of_an_extra_count_only_when_asked_for():
    lines = ['sglang>=0.5.5; extra == "gpu"']
    assert dependencies.find_problems(lines, version_of=fake_versions()) == []
    assert dependencies.find_problems(lines, "gpu", fake_versions()) == ["sglang is not installed, needed >=0.5.5"]


def test_the_error_says_how_to_repair(monkeypatch):
    monkeypatch.setattr(dependencies, "requirements_of_slime", lambda: ["no-such-package-here>=1"])
    with pytest.raises(RuntimeError, match="no-such-package-here is not installed, needed >=1.*make install.*activate"):
        dependencies.check_dependencies()


def test_a_checkout_that_was_never_installed_needs_the_main_packages_only(monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(dependencies.metadata, "requires", not_found)
    dependencies.check_dependencies()
    monkeypatch.setattr(dependencies, "MAIN_PACKAGES", ["torch", "no-such-package-here"])
    with pytest.raises(RuntimeError, match=f"of {sys.executable} do not fit: no-such-package-here is not installed"):
        dependencies.check_dependencies()
