"""Derivations of tables: bringing them into force, building, switching, dropping and checking them.

Writers call their functions (`anabranch.client.table_access`). The reasons for each step are in
docs/inside/decisions/0057-derived-tables.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, cast

from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.transaction import Transaction
from anabranch.core.derived_rows import (
    BUILDING,
    PROGRESS_KEY,
    READY,
    RETIRED,
    STATE_KEY,
    AnyFunction,
    Function,
    Total,
    Totals,
    entry_end,
    is_entry,
    total_of,
    value_of,
)
from anabranch.core.stream_settings import (
    BUILT,
    DERIVE,
    DERIVED,
    TABLE,
    VERSIONS_MS,
    Derived,
    Kind,
    check_derivation,
    derived_from,
    derived_table,
    differences,
    versions_of,
)
from anabranch.errors import (
    DerivationFailed,
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    StreamExists,
    UnknownStream,
    UnsupportedSetting,
    count_of,
)
from anabranch.extras import need
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import check_type, split_stream
from anabranch.protocol.schemas import records as r

if TYPE_CHECKING:
    from anabranch.client.calls.reading import Reading
    from anabranch.client.replica import Replica
    from anabranch.client.shared import Shared
    from anabranch.client.table_transaction import TableTransaction
    from anabranch.core.derived_rows import DerivingFunction
    from anabranch.tables.indexes import IndexFunction
    from anabranch.tables.snapshot import TableSnapshot

_NONCE = 16  # bytes
# Rows of a transaction that builds: of commits of more keys a leader knows only the bounds.
_PIECE = 64
_MOST_SHOWN = 1_000
_OTHER = "was dropped or made again while it was built: build it again"
T = TypeVar("T")


class Deriving:
    """Calls of `Client` about derivations, with its arguments and errors; names are the same."""

    def __init__(self, shared: Shared, reading: Reading, *, threads: bool) -> None:
        """``threads``: as of `Client`."""
        self._shared, self._session = shared, shared.session
        self._reading, self._threads = reading, threads
        self._later: dict[r.Derivation, AnyFunction] = {}  # asynchronous ones

    def _replica(self, *tables: str, timeout: float | None) -> Replica:
        return self._reading.replica(tables, None, timeout, threads=self._threads, index=None)

    def derive(
        self,
        source: str,
        name: str,
        function: DerivingFunction,
        version: int,
        timeout: float | None,
        *,
        kind: Kind,
    ) -> str:
        check_type("a version", version, int)
        split_stream(source)
        of = r.Derivation(source, check_derivation(name), version)
        made = function_of(of, function, kind)
        found = self._source(source, timeout)
        if kind == "asynchronous":
            return self._derive_later(made, found, timeout)
        is_built = self._create(made, kind, found, timeout)
        self._shared.derivations.add(made)
        in_force = versions_of(found.settings, name)
        # Look-ups use the lower one of two versions in force.
        if not in_force or (not is_built and in_force[0] == version):
            self._build(made, timeout)
        return made.table

    def _derive_later(self, made: AnyFunction, source: r.StreamInfo, timeout: float | None) -> str:
        """Create the derived table, whose rows a worker will write."""
        if versions := versions_of(source.settings, made.of.name):
            raise IllegalState(
                f"version {versions[-1]} of derivation {made.of.name!r} of {made.of.source} is in force, and its "
                "writers write its rows: take another name"
            )
        since = 0 if source.base is None else source.base.timestamp
        self._create(made, "asynchronous", source, timeout, since)
        self._later[made.of] = made
        return made.table

    def _create(
        self,
        made: AnyFunction,
        kind: Kind,
        source: r.StreamInfo,
        timeout: float | None,
        since: int = 0,
    ) -> bool:
        """Create the derived table unless it exists; returns whether it is built. Raises: StreamExists.

        ``since``: as of `Derived`, for a table that does not exist.
        """
        wanted = {TABLE: "true", DERIVED: Derived(made.of, kind, since).text}
        deadline = self._shared.deadline(timeout)
        try:
            found = self._session.describe(made.table, deadline)
        except UnknownStream:
            kept = {n: v for n, v in source.settings.items() if n == VERSIONS_MS}
            command = r.CreateStream(made.table, len(source.segments), wanted | kept, adopt=False)
            found = self._session.create_stream(command, deadline)
        if (there := derived_from(found.settings)) is not None:
            if there.of == made.of and there.kind != kind:
                raise StreamExists(
                    f"version {made.of.version} of derivation {made.of.name!r} of {made.of.source} is of kind "
                    f"{there.kind!r}, and not {kind!r}: give a derivation of another kind a higher version or "
                    "another name"
                )
            wanted[DERIVED] = Derived(made.of, kind, there.since).text
        if unlike := differences(wanted, found.settings, only_asked=True):
            raise StreamExists(f"{made.table} exists, but {', '.join(unlike)}")
        return BUILT in found.settings

    def _source(self, source: str, timeout: float | None) -> r.StreamInfo:
        found = self._session.describe(source, self._shared.deadline(timeout))
        if TABLE not in found.settings:
            raise InvalidArgument(f"{source} is no table: a derivation has a table as its source")
        if DERIVED in found.settings:
            raise UnsupportedSetting(f"{source} is a derived table, which is no source of others")
        self._shared.derivations.learn(source, found.settings)
        return found

    def rebuild(self, source: str, name: str, timeout: float | None) -> str:
        functions = self._shared.derivations.named(source, check_derivation(name))
        tables = self._tables_of_workers(source, name, timeout)
        if tables and (not functions or functions[-1].of < tables[-1].of):
            return self._switch_later(tables, timeout)
        if not functions:
            raise DerivationMissing(
                f"this client has no function of derivation {name!r} of {source}: `client.derive` first"
            )
        self._build(functions[-1], timeout)
        return functions[-1].table

    def _tables_of_workers(self, source: str, name: str, timeout: float | None) -> list[Derived]:
        """The asynchronous versions of a derivation that have a table, rising."""
        scope, _ = split_stream(source)
        streams = self._session.streams(scope, self._shared.deadline(timeout)).check()
        derived = (derived_from(each.settings) for each in streams)
        found = [
            each
            for each in derived
            if each is not None
            and each.asynchronous
            and (each.of.source, each.of.name) == (source, name)
        ]
        return sorted(found, key=lambda each: each.of.version)

    def _may_be_in_use(self, tables: Sequence[Derived], timeout: float | None) -> Sequence[Derived]:
        """These tables without former ones, whose workers may have stopped."""
        deadline = self._shared.deadline(timeout)
        for at, each in reversed(list(enumerate(tables))):
            if BUILT in self._session.describe(derived_table(each.of), deadline).settings:
                return tables[at:]
        return tables

    def _switch_later(self, tables: Sequence[Derived], timeout: float | None) -> str:
        """Let look-ups use the highest version from one commit timestamp on, once its workers are up to date."""
        *former, newest = (each.of for each in tables)
        table, scope = derived_table(newest), split_stream(newest.source)[0]
        with self._replica(table, timeout=timeout) as replica, replica.snapshot(timeout=timeout):
            pass  # it has all that was committed before this call
        keepalive_ms = keepalive_ms_of(defaults.KEEPALIVE_S)
        with Transaction(self._shared, scope, None, keepalive_ms) as txn:
            txn.ran = (newest, *former)
            txn.write(table, READY, key=STATE_KEY)
            for each in former:
                txn.write(derived_table(each), RETIRED, key=STATE_KEY)
            txn.commit(timeout=timeout)
        self._note_built(table, timeout)
        return table

    def _build(self, made: AnyFunction, timeout: float | None) -> None:
        """Bring a version into force, build its table, switch, and take the former version out of force."""
        of = made.of
        with self._replica(of.source, made.table, timeout=timeout) as replica:
            there = self._versions(of, timeout)
            if of.version not in there:
                self._check_unused(made, there, replica, timeout)
                self._move(of, "+", timeout)
                there = self._versions(of, timeout)  # a lower one may have come before this one
            former = [of._replace(version=each) for each in there if each < of.version]
            state = replica.transact(lambda txn: _begin(txn, made), timeout=timeout).value
            if state is not None:
                _build_rows(replica, made, state)
                replica.transact(lambda txn: _switch(txn, made, former, state), timeout=timeout)
        for each in former:
            self._move(each, "-", timeout)
        self._note_built(made.table, timeout)

    def _note_built(self, table: str, timeout: float | None) -> None:
        """Save later calls of `derive` from reading the table, and `check` from reading former ones."""
        command = r.AlterStream(table, {BUILT: "true"}, ())
        with suppress(NotAuthorized):  # then they read it
            self._session.ask_stream(table, command, self._shared.deadline(timeout))

    def _versions(self, of: r.Derivation, timeout: float | None) -> tuple[int, ...]:
        return versions_of(self._source(of.source, timeout).settings, of.name)

    def _check_unused(
        self, made: AnyFunction, before: Sequence[int], replica: Replica, timeout: float | None
    ) -> None:
        """`IllegalState` if a later version is in force, or the table has rows of a time in which this one was."""
        of = made.of
        if before and max(before) > of.version:
            raise IllegalState(
                f"version {max(before)} of derivation {of.name!r} of {of.source} is in force: version {of.version} "
                "is older"
            )
        with replica.snapshot() as view:
            used = next(view.scan(made.table, limit=1), None) is not None
        # Another process may have brought it into force meanwhile.
        if used and of.version not in self._versions(of, timeout):
            raise IllegalState(
                f"{made.table} has rows of an earlier time: take a higher version, or delete that table first"
            )

    def _move(self, of: r.Derivation, sign: str, timeout: float | None) -> None:
        """Bring a version into force (+), or take it out of force (-)."""
        command = r.AlterStream(of.source, {DERIVE + of.name: f"{sign}{of.version}"}, ())
        info = self._session.ask_stream(of.source, command, self._shared.deadline(timeout))
        self._shared.derivations.learn(of.source, info.settings)

    def drop(self, source: str, name: str, version: int | None, timeout: float | None) -> None:
        there = versions_of(self._source(source, timeout).settings, check_derivation(name))
        gone = there if version is None else (version,)
        if not gone or not set(gone) <= set(there):
            found = ", ".join(map(str, there)) or "none"
            raise InvalidArgument(
                f"{source} has no such version of derivation {name!r}; versions in force: {found}"
            )
        for each in gone:
            of = r.Derivation(source, name, each)
            with (
                suppress(UnknownStream),  # it was lost, and is deleted
                self._replica(derived_table(of), timeout=timeout) as replica,
            ):
                replica.transact(partial(_retire, of=of), timeout=timeout)
            self._move(of, "-", timeout)

    def check(
        self, source: str, name: str, function: DerivingFunction | None, timeout: float | None
    ) -> list[str]:
        check_derivation(name)
        known = self._shared.derivations
        made_later = self._tables_of_workers(source, name, timeout)
        later = [derived_table(each.of) for each in self._may_be_in_use(made_later, timeout)]
        need("rocksdict", extra="tables")
        from anabranch.tables.snapshot import in_use

        tables = dict.fromkeys([source, *later])
        with (
            self._replica(*tables, timeout=timeout) as replica,
            replica.snapshot(timeout=timeout) as view,
        ):
            derived = in_use(view, name)
            if derived is None:
                raise DerivationMissing(f"{source} has no derivation {name!r} that is built")
            if function is not None:
                made = function_of(derived.of, function, derived.kind)
            else:
                made = self._later.get(derived.of) or known.function(derived.of)
            found = (
                totals_compared(view, made) if isinstance(made, Totals) else compared(view, made)
            )
            return list(islice(found, _MOST_SHOWN))


def function_of(of: r.Derivation, function: DerivingFunction, kind: Kind) -> AnyFunction:
    """A version of a derivation, with a user's function. Raises: InvalidArgument, NotInstalled."""
    need("rocksdict", extra="tables")
    from anabranch.tables.indexes import Indexed

    if not callable(function):
        raise InvalidArgument(
            f"derivation {of.name!r}: {function!r:.100} is no function of key and row"
        )
    if kind == "totals":
        return Totals(of, function)
    values = cast("IndexFunction", function)
    return Function(of, kind, Indexed(of.source, of.name, values).of)


def compared(view: TableSnapshot, made: Function) -> Iterator[str]:
    """The differences between a derived table and its source, each in words."""
    source, table = made.of.source, made.table
    for key, row in view.scan(source):
        for entry, held in made.entries(key, row).items():
            found = view.get(table, entry)
            if found != held:
                what = "is missing" if found is None else f"names row {found!r:.100}"
                yield f"{table} {entry!r:.100} of row {key!r:.100} {what}"
    for entry, held in view.scan(table):
        if not is_entry(entry):
            continue
        key = held if made.unique else entry[entry_end(entry) :]
        if made.entries(key, view.get(source, key)).get(entry) != held:
            yield f"{table} {entry!r:.100} has no row {key!r:.100} with that value"


def totals_compared(view: TableSnapshot, made: Totals) -> Iterator[str]:
    """As `compared`, of totals. All totals are held in memory."""
    sums: dict[bytes, list[int]] = {}
    for key, row in view.scan(made.of.source):
        for entry, number in made.numbers(key, row).items():
            its = sums.setdefault(entry, [0, 0])
            its[0] += number
            its[1] += 1
    for entry, held in view.scan(made.table):
        if entry == STATE_KEY:
            continue
        found, right = total_of(held), Total(*sums.pop(entry, (0, 0)))
        if found != right:
            yield _differs(made, entry, found, right)
    for entry, its in sorted(sums.items()):
        yield _differs(made, entry, Total(), Total(*its))


def _differs(made: Totals, entry: bytes, found: Total, right: Total) -> str:
    return (
        f"{made.table} has {found.sum:,} of {count_of(found.rows, 'row')} for {value_of(entry)!r:.100}, and the "
        f"rows have {right.sum:,} of {right.rows:,}"
    )


def _begin(txn: TableTransaction, made: AnyFunction) -> bytes | None:
    """Make the state `building`; returns the state to switch from, or None if the table is ready."""
    state = txn.get(made.table, STATE_KEY)
    if state == READY:
        return None
    if state == RETIRED:
        raise IllegalState(f"{made.table} was in force before: take a higher version")
    if state is None:
        if made.kind == "totals" and next(txn.scan(made.table, limit=1), None):
            raise IllegalState(f"{made.table} has totals of an earlier time: take a higher version")
        state = BUILDING + os.urandom(_NONCE)
        txn.write_entries(made.of, ((STATE_KEY, state),))
    return state


def _retire(txn: TableTransaction, of: r.Derivation) -> None:
    txn.write_entries(of, ((STATE_KEY, RETIRED),))


def _build_rows(replica: Replica, made: AnyFunction, state: bytes) -> None:
    """Derive from the rows of the source, beginning after the progress of the build."""
    with replica.snapshot() as view:
        begun = view.get_version(made.table, STATE_KEY).timestamp
        done = view.get(made.table, PROGRESS_KEY)
        seen = view.walk(made.of.source, b"" if done is None else done + b"\0", None)
        keys = [each.key for each in islice(seen, _PIECE)]
        size = _PIECE
        while keys:
            piece = _Piece(made, state, begun, keys[:size])
            count = replica.transact(piece).value
            size = min(
                _PIECE, 2 * count
            )  # what broke the locks of a larger piece probably continues
            keys = [*keys[count:], *(each.key for each in islice(seen, count))]


class _Piece:
    """One transaction of a build. After each try that failed it takes half as many rows."""

    def __init__(self, made: AnyFunction, state: bytes, begun: int, keys: Sequence[bytes]) -> None:
        """``begun``: the time of the state, since which writers add each row that they write to totals."""
        self._made, self._state, self._begun, self._keys = made, state, begun, keys
        self._count = 2 * len(keys)

    def __call__(self, txn: TableTransaction) -> int:
        """Derive from the first keys; returns how many are done."""
        made = self._made
        self._count = max(1, self._count // 2)
        keys = self._keys[: self._count]
        state = txn.get(made.table, STATE_KEY)
        if state == READY:
            return len(keys)  # another process was first
        if state != self._state:
            raise IllegalState(f"{made.table} {_OTHER}")
        done = txn.get(made.table, PROGRESS_KEY)
        due = [key for key in keys if done is None or key > done]
        if isinstance(made, Totals):
            self._add(txn, made, due)
        else:
            self._put(txn, made, due)
        if done is None or keys[-1] > done:
            txn.write_entries(made.of, ((PROGRESS_KEY, keys[-1]),))
        return len(keys)

    def _put(self, txn: TableTransaction, made: Function, keys: Iterable[bytes]) -> None:
        for key in keys:
            row = txn.get(made.of.source, key)
            entries = {} if row is None else self._of(made.entries, key, row)
            if made.unique:
                txn.check_unique(made, entries, key)
            txn.write_entries(made.of, entries.items())

    def _add(self, txn: TableTransaction, made: Totals, keys: Iterable[bytes]) -> None:
        changes: dict[bytes, Total] = {}
        for key in keys:
            row = txn.unchanged(made.of.source, key, self._begun)
            numbers = {} if row is None else self._of(made.numbers, key, row)
            for entry, number in numbers.items():
                before = changes.get(entry, Total())
                changes[entry] = Total(before.sum + number, before.rows + 1)
        txn.write_entries(made.of, txn.added(made, changes).items())

    def _of(
        self, derive: Callable[[bytes, bytes], Mapping[bytes, T]], key: bytes, row: bytes
    ) -> Mapping[bytes, T]:
        try:
            return derive(key, row)
        except Exception as error:
            of = self._made.of
            raise DerivationFailed(
                f"derivation {of.name!r} of {of.source}, version {of.version}, is not built: its function raised "
                f"{type(error).__name__} for row {key!r:.100}: {error}. Call `derive` with a function that takes "
                "this row, and the build continues; or `drop_derivation`, and correct the row"
            ) from error


def _switch(
    txn: TableTransaction, made: AnyFunction, retired: Iterable[r.Derivation], state: bytes
) -> None:
    found = txn.get(made.table, STATE_KEY)
    if found == READY:
        return  # another process was first
    if found != state:
        raise IllegalState(f"{made.table} {_OTHER}")
    txn.write_entries(made.of, ((PROGRESS_KEY, None), (STATE_KEY, READY)))
    for of in retired:
        _retire(txn, of)
