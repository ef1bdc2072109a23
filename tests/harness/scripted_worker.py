"""`python -m workers` with a modelled engine that can be told what to say: for tests of what stands behind the tokens.

Where the prompt contains `PLAY[<text>]ENDPLAY`, the reply is that text and an end of turn. As with any model, the next
token depends on the context alone, so a reply may begin on one worker and go on at another.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

import workers.engines.modelled
from ampd.child_process import exit_now
from workers.__main__ import main
from workers.engines.modelled_request import ActiveRequest, Choice
from workers.engines.modelled_tokens import Token, TokenSource

MODEL = Path(sys.argv[sys.argv.index("--model") + 1])
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TURN = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
END = TOKENIZER.token_to_id("<|im_end|>")


class ScriptedSequence(ActiveRequest):
    """A request whose prompt may say what to answer."""

    def advance(self, choice: Choice, source: TokenSource) -> None:
        token_id = next_token(self.request.token_ids + choice.tokens)
        if token_id is not None:
            played: Any = SimpleNamespace(choose=lambda *_: Token(token_id, -0.5, ()))
            source = played
        super().advance(choice, source)


def next_token(context: list[int]) -> int | None:
    """What the script says, None if there is none."""
    start = next(at for at in range(len(context), -1, -1) if context[at - len(TURN) : at] == TURN or at == 0)
    scripts = re.findall(
        r"PLAY\[(.*?)\]ENDPLAY", TOKENIZER.decode(context[:start], skip_special_tokens=False), re.DOTALL
    )
    if not start or not scripts:
        return None
    script = TOKENIZER.encode(scripts[-1], add_special_tokens=False).ids
    said = len(context) - start
    return script[said] if said < len(script) else END


if __name__ == "__main__":
    workers.engines.modelled.ActiveRequest = ScriptedSequence  # type: ignore[attr-defined]
    exit_now(main())
