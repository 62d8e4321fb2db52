import logging

import pytest

from slime.observability.logging_utils import configure_logger, log, set_writer, take_logged


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


def test_metrics_of_users_functions_wait_for_the_driver_and_are_written_at_once_in_it():
    log(None, {"rollout/mine": 1.0, "rollout/step": 3}, step_key="rollout/step")
    log(None, {"rollout/other": 2.0}, step_key="rollout/step")
    assert take_logged() == {"rollout/mine": 1.0, "rollout/other": 2.0} and take_logged() == {}
    written = []
    set_writer(lambda *call: written.append(call))
    try:
        log(None, {"rollout/mine": 1.0, "rollout/step": 3}, step_key="rollout/step")
    finally:
        set_writer(None)
    assert written == [({"rollout/mine": 1.0}, "rollout/step", 3)] and take_logged() == {}
