"""The library logs and is otherwise silent; the command line shows what it logs."""

import logging

import pytest

from letkd import progress


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger="letkd")
    return caplog


def test_a_library_call_prints_nothing_and_logs_its_messages(logged, capsys):
    progress.say("the teacher keeps its BN")
    with progress.bar("fitting", 3) as tick:
        tick()
    assert capsys.readouterr() == ("", "")
    assert [(record.name, record.levelname, record.getMessage()) for record in logged.records] == [
        ("letkd", "INFO", "the teacher keeps its BN")
    ]


def test_the_command_line_shows_each_message_once(capsys):
    root = logging.StreamHandler()
    logging.getLogger().addHandler(root)
    try:
        progress.set_quiet(False)
        progress.say("100 % of \x1b[2J")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr() == ("", "100 % of \\x1b[2J\n")


def test_quiet_again_it_is_silent(capsys):
    progress.set_quiet(False)
    progress.set_quiet(True)
    progress.say("nothing")
    assert capsys.readouterr() == ("", "")
