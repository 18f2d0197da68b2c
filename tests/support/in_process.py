"""The command line in the tests' own process."""

import contextlib
import io
import sys

from letkd.cli.main import main
from letkd.progress import set_quiet


def letkd(*arguments: object) -> tuple[int, str, str]:
    """Run a command: exit code, standard output, standard error. It may raise nothing but SystemExit."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["letkd", *map(str, arguments)]
    set_quiet(False)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = argv
        set_quiet(True)
    return code, out.getvalue(), err.getvalue()
