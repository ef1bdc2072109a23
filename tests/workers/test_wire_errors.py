"""A worker's refusal keeps its status through Dynamo."""

import pytest

from ampd.wire import error_text, parse_error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (error_text(400, "too long"), (400, "too long")),
        ("Backend: " + error_text(503, "gone\naway"), (503, "gone\naway")),
        (
            'BackendInvalidArgument: {"message":"ampd-error 400: say \\"please\\" {x}","code":400}',
            (400, 'say "please" {x}'),
        ),
        ('BackendUnknown: {"message":"something else","code":500}', None),
        ("CannotConnect: instance_id=57005 not found {", None),
        ("", None),
    ],
)
def test_parse(text: str, expected: tuple[int, str] | None) -> None:
    assert parse_error(text) == expected
