"""The command line. Commands are added beside this module."""

import typer

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.callback()
def main() -> None:
    """Transactions for Kafka-compatible logs."""
