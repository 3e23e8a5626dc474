"""`radixkv demo`. Knows that there is one."""

import typer

from radixkv.cli.common import command


@command("demo")
def demo_command() -> None:
    """A real model without and with the cache, then a replay. The model takes the extra radixkv\\[demo]."""
    from radixkv import demo  # here: it shows a replay through the command line itself

    raise typer.Exit(demo.run())
