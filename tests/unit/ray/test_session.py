import os
import signal
from types import SimpleNamespace

import pytest

from slime.ray.interrupts import uninterrupted
from slime.ray.session import make_folders


def test_folders_that_cannot_be_written_name_their_flag(tmp_path):
    (tmp_path / "file").write_text("")
    make_folders(SimpleNamespace(run_dir=str(tmp_path / "a b" / "run"), save=None))
    assert (tmp_path / "a b" / "run").is_dir()
    with pytest.raises(OSError, match="--output-dir: cannot write to .*file/run: Not a directory"):
        make_folders(SimpleNamespace(run_dir=str(tmp_path / "file" / "run"), save=None))
    with pytest.raises(OSError, match="--save: cannot write to .*file/save"):
        make_folders(SimpleNamespace(run_dir=str(tmp_path / "run"), save=str(tmp_path / "file" / "save")))


def test_a_second_interrupt_does_not_cut_the_end_short():
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
