import pytest

from specrelay.serve import last_error_line

TRACEBACK = """The deployment failed to start 3 times in a row. Retrying.
ray::ServeReplica:laptop:target.initialize_and_get_metadata() (pid=1)
  File "replica.py", line 10, in __init__
    raise VocabularyError(...)
models.loading.VocabularyError: small and big disagree at token 7: give them one tokenizer
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (TRACEBACK, "small and big disagree at token 7: give them one tokenizer"),
        (TRACEBACK + "\nSee the logs: /tmp/ray", "small and big disagree at token 7: give them one tokenizer"),
        ("a\nmodels.loading.UnsupportedModel: layers: 40 is not within its 30", "layers: 40 is not within its 30"),
        ("Traceback (most recent call last):\nKeyError: 'x'", "'x'"),
        ("Deployment could not be placed", "Deployment could not be placed"),
        ("", "the app failed to start; see Ray's logs"),
    ],
)
def test_the_cause_is_taken_from_the_end_of_a_traceback(message: str, line: str) -> None:
    assert last_error_line(message) == line
