"""`anabranch controller`, changed to kill itself right after it has logged the decision of a commit."""

from __future__ import annotations

import os
import signal
from typing import Any

from anabranch.cli import app
from anabranch.controller.controller import Controller
from anabranch.controller.leader import Leader
from anabranch.core.decisions.turn import Turn


class Armed(Controller):
    """A controller that dies at its first decision of a commit."""

    def _write(self, turn: Turn, *given: Any, **named: Any) -> bool:
        wrote = super()._write(turn, *given, **named)
        if wrote and any(op.op == "BEGIN_COMMIT" for _, _, op in turn.round.ops):
            os.kill(os.getpid(), signal.SIGKILL)
        return wrote


if __name__ == "__main__":
    Leader.controller = Armed
    app()
