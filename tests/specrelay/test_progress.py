import io

from rich.console import Console

from specrelay.progress import StartProgress


def test_a_step_is_one_line_with_the_seconds_since_the_start() -> None:
    times_s = iter([10.0, 10.5, 12.0])
    console = Console(file=io.StringIO(), width=80, record=True)
    with StartProgress(console, clock=lambda: next(times_s)) as tell:
        tell("downloading")
        tell("downloading")
        tell("ready [x]")
    assert console.export_text().splitlines() == ["   0.5 s  downloading", "   2.0 s  ready [x]"]


def test_a_terminal_has_its_cursor_back_after_close() -> None:
    file = io.StringIO()
    with StartProgress(Console(file=file, force_terminal=True)) as tell:
        tell("loading")
        assert "\x1b[?25h" not in file.getvalue()
        tell.close()
        assert file.getvalue().count("\x1b[?25h") == 1
