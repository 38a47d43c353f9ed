"""The command line. Each command reads its arguments and calls one function; heavy imports wait until one needs them.

Exit codes: 0 done, 1 failed later, 2 anything refused before serving; an error is one line on stderr.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specrelay.endpoint import endpoint_at
from specrelay.exits import Exit

if TYPE_CHECKING:
    from cluster.config import AppConfig

app = typer.Typer(
    name="specrelay",
    help="Adaptive multi-level speculative decoding, served on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, as in configs/")]
Url = Annotated[str, typer.Option("--url", help="Where the app answers.")]
KeyEnv = Annotated[str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")]
Port = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Instead of the config's http.port.")]
DEFAULT_URL = "http://127.0.0.1:8000"
TABLE_WIDTH = 160


def main() -> None:
    """Entry of `python -m specrelay`."""
    with one_line_errors():
        app(prog_name="python -m specrelay")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors that a user can mend become one line on stderr and their exit code."""
    try:
        yield
    except Exit as error:
        leave(error.message, error.code)
    except KeyboardInterrupt:
        leave("stopped", 1)
    except Exception as error:
        if not is_refusal(error):
            raise
        leave(str(error), 2)


def leave(message: str, code: int) -> None:
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")
    sys.exit(code)


def is_refusal(error: Exception) -> bool:
    """Whether a lower layer says by it that config, machine or weights do not allow the start."""
    from cluster.config_errors import RefusedError
    from models.weights import WeightsError

    return isinstance(error, RefusedError | WeightsError)


def table_console() -> Console:
    """Into a file or a pipe tables are wide enough to be whole."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


def read_config(path: Path, port: int | None = None) -> "AppConfig":
    """The config, its port overridden."""
    from cluster.config import load_config, with_port

    config = load_config(path)
    return config if port is None else with_port(config, port)


@app.command()
def serve(
    config: ConfigPath,
    port: Port = None,
) -> None:
    """Serve the models of CONFIG until Ctrl-C."""
    app_config = read_config(config, port)
    from specrelay.serve import serve_until_stopped

    serve_until_stopped(app_config, Console())


@app.command()
def plan(config: ConfigPath) -> None:
    """Show which replica would stand on what; nothing is started."""
    from specrelay.plan import show_plan

    show_plan(read_config(config), table_console())


@app.command()
def batch(
    config: ConfigPath,
    source: Annotated[Path, typer.Option("--input", help="JSONL: {id?, prompt | messages, …request fields} per line.")],
    output: Annotated[Path, typer.Option("--output", help="JSONL: {id, index, response | error} per line, in order.")],
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 8,
    port: Port = None,
) -> None:
    """Answer all prompts of a file, by a running app of the same CONFIG or one started for it."""
    from specrelay.batch_rows import check_output, read_rows

    app_config = read_config(config, port)
    rows = read_rows(source, app_config.served_model_id)
    check_output(output)
    from specrelay.batch_run import run_with_app

    run_with_app(app_config, rows, output, concurrency, Console(stderr=True))


@app.command()
def status(url: Url = DEFAULT_URL, api_key_env: KeyEnv = None) -> None:
    """Show the router's live table."""
    from specrelay.status import show_status

    show_status(endpoint_at(url, key_env=api_key_env), table_console())


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    api_key_env: KeyEnv = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens per answer.")] = None,
) -> None:
    """Talk with the running app. /new forgets the history, /exit or Ctrl-D ends."""
    from specrelay.chat import Conversation, Terminal, converse, served_model

    endpoint = endpoint_at(url, key_env=api_key_env)
    given = {"temperature": temperature, "max_tokens": max_tokens}
    fields = {name: value for name, value in given.items() if value is not None}
    converse(endpoint, Conversation(served_model(endpoint), system, fields), Terminal(Console()))
