"""One record of the arguments of `commit` and `prepare`, for all paths that a commit may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from anabranch.errors import InvalidArgument
from anabranch.protocol.ids import is_marked
from anabranch.protocol.legal_names import check_number, check_type
from anabranch.protocol.schemas import records as r
from anabranch.types import Receipt, TaskOwnership, receipt_records

Wait: TypeAlias = Literal["merged", "decided"]  # when `commit` returns


@dataclass(slots=True)
class CommitParts:
    """Everything that a call of `Transaction.commit` or `prepare` asks for besides the events."""

    receipts: Sequence[Receipt | bytes] | None = None
    name: str | None = None
    number: int | None = None
    consumed: r.Consumed | None = None
    secret: bytes | None = None
    wait: Wait = "merged"

    def __post_init__(self) -> None:
        check_number(self.name, self.number)
        if self.wait not in get_args(Wait):
            raise InvalidArgument(f"wait={self.wait!r}: use {' or '.join(get_args(Wait))}")

    @property
    def decided(self) -> bool:
        """Whether the decision is enough for the caller."""
        return self.wait == "decided"

    @property
    def fit_one_command(self) -> bool:
        """Whether one command can have these parts together with the events."""
        return not self.receipts and self.number is None

    @property
    def are_marked(self) -> bool:
        """Whether the id of a one-shot with these parts is marked (`anabranch.protocol.ids`)."""
        return self.consumed is not None and self.name is None

    def check_consumed(self, ownership: TaskOwnership | None) -> None:
        """Raise `InvalidArgument` unless ``consumed`` belongs to the ownership that the transaction began with."""
        consumed = self.consumed
        if consumed is not None:
            check_type("consumed", consumed, r.Consumed)
        began = None if ownership is None else (ownership.processor, ownership.fencing_token)
        if began != (None if consumed is None else (consumed.processor, consumed.fencing_token)):
            raise InvalidArgument(
                "begin with a task ownership, and commit with what its reader gives as `consumed`: both, or neither"
            )

    def check_id(self, txn_id: bytes | None) -> None:
        """Raise `InvalidArgument` if the id, which exists already, is not of the kind that a one-shot needs."""
        if self.are_marked and txn_id is not None and not is_marked(txn_id):
            raise InvalidArgument(
                "its id was made by `assign_id`, and a commit with `consumed` makes one of its own: commit with a "
                "`name`, too, or do not call `assign_id`"
            )

    def command(self, txn_id: bytes | None, prepare: r.Prepare | None = None) -> r.Commit:
        """The command for a transaction that is open at the controller, without token and own receipts.

        Raises: InvalidArgument (a receipt is of another transaction).
        """
        records = receipt_records(self.receipts, txn_id)
        return r.Commit(
            b"", (), records, self.name, 0, self.number, self.consumed, prepare, self.secret
        )
