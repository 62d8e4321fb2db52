import logging

import pytest

from slime.observability.logging_utils import configure_logger


@pytest.fixture(autouse=True)
def _restore_root_logger():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_names_time_role_rank_file_and_message(capsys):
    configure_logger("info", role="actor", rank=1)
    logging.getLogger("slime.x").info("hello")
    line = capsys.readouterr().err
    assert " actor-1] test_logging_utils.py:" in line
    assert line.endswith(" - hello\n")


def test_configuring_twice_prints_once(capsys):
    configure_logger("INFO")
    configure_logger("INFO", role="driver")
    logging.getLogger("slime.x").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_the_level_is_obeyed(capsys):
    configure_logger("WARNING")
    logging.getLogger("slime.x").info("quiet")
    assert capsys.readouterr().err == ""


def test_an_unknown_level_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="LOUD.*DEBUG"):
        configure_logger("loud")
