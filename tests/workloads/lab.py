"""Sessions to replay."""

from workloads.trace import Round, Session


def session(name: str, *rounds: Round, arrival_s: float = 0.0) -> Session:
    return Session(session_id=name, arrival_s=arrival_s, rounds=rounds)


GROWING = session(
    "a",
    Round(incr_tokens=30, output_tokens=4),
    Round(incr_tokens=10, output_tokens=3),
    Round(incr_tokens=5, output_tokens=2, keep_tokens=20),
)
