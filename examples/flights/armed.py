"""`anabranch controller`, changed to kill itself right after it has logged the decision of a commit."""

from __future__ import annotations

import os
import signal
from typing import Any

from anabranch.cli import app
from anabranch.controller.controller import Controller
from anabranch.controller.leader import Leader


class Armed(Controller):
    """A controller that dies at its first decision of a commit."""

    def _finish(self, writing: Any) -> None:
        super()._finish(writing)
        if any(op.op == "BEGIN_COMMIT" for _, _, op in writing.turn.round.ops):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Leader.controller = Armed
    app()
