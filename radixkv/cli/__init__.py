"""The command line: one module a command."""

import os
import sys
from typing import Annotated, cast

import typer

import radixkv
from radixkv.cli import convert, curve, demo, explain, plan, replay, report  # noqa: F401  they register their commands
from radixkv.cli.common import app
from radixkv.errors import TraceError

# subtle: typer has a click of its own or not, by its version, and exports one of its errors; this is the base of all
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (default: the program's own) and return the exit code.

    0; 2 for bad arguments or a bad file, told in one line on stderr; 130 for Ctrl-C; 1 if nobody reads stdout any more.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until exit
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="radixkv", standalone_mode=False)
        sys.stdout.flush()  # subtle: at exit would be too late to catch a closed pipe
        return code or 0
    except _UsageError as error:
        message = error.format_message()
    except TraceError as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except OSError as error:
        if error.filename is None:  # of no file that was opened, so of stdout: a full disk
            _silence_stdout()
        message = f"{error.filename or 'stdout'}: {error.strerror}"
    print(f"radixkv: {message}", file=sys.stderr)
    return 2


def _silence_stdout() -> None:
    """What is left to be written must not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def _radixkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """A prefix cache for LLM inference, and what it is worth on a trace."""
    if version:
        print(radixkv.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
