"""Derivations of tables: bringing them into force, building, switching, dropping and checking them.

Writers call their functions (`anabranch.client.table_access`). The reasons for each step are in
docs/inside/decisions/0057-derived-tables.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.transaction import Transaction
from anabranch.core.derived_rows import (
    BUILDING,
    READY,
    RETIRED,
    STATE_KEY,
    Function,
    entry_end,
    is_entry,
)
from anabranch.core.stream_settings import (
    DERIVE,
    DERIVED,
    TABLE,
    VERSIONS_MS,
    Derived,
    check_derivation,
    derived_from,
    derived_table,
    differences,
    versions_of,
)
from anabranch.errors import (
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    StreamExists,
    UnknownStream,
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
    from anabranch.tables.indexes import IndexFunction
    from anabranch.tables.snapshot import TableSnapshot

_NONCE = 16  # bytes
_PIECE = (
    64  # rows of a transaction that builds: of commits of more keys a leader knows only the bounds
)
_MOST_SHOWN = 1_000


class Deriving:
    """Calls of `Client` about derivations, with its arguments and errors; names are the same."""

    def __init__(self, shared: Shared, reading: Reading, *, threads: bool) -> None:
        """``threads``: as of `Client`."""
        self._shared, self._session = shared, shared.session
        self._reading, self._threads = reading, threads
        self._later: dict[r.Derivation, Function] = {}  # asynchronous ones

    def _replica(self, *tables: str, timeout: float | None) -> Replica:
        return self._reading.replica(tables, None, timeout, threads=self._threads, index=None)

    def derive(
        self,
        source: str,
        name: str,
        function: IndexFunction,
        version: int,
        timeout: float | None,
        *,
        unique: bool,
        asynchronous: bool,
    ) -> str:
        check_type("a version", version, int)
        split_stream(source)
        of = r.Derivation(source, check_derivation(name), version)
        made = function_of(of, function, unique=bool(unique))
        found = self._source(source, timeout)
        if asynchronous:
            return self._derive_later(made, found, timeout)
        is_new = self._create(made, found, timeout)
        self._shared.derivations.add(made)
        in_force = versions_of(found.settings, name)
        # A version in force whose table is new has lost its former table.
        if not in_force or (is_new and version in in_force):
            self._build(made, timeout)
        return made.table

    def _derive_later(self, made: Function, source: r.StreamInfo, timeout: float | None) -> str:
        """Create the derived table, whose rows a worker will write."""
        if made.unique:
            raise InvalidArgument(
                f"derivation {made.of.name!r}: a worker comes after the commit, so it can't refuse a value that "
                "another row has: a unique derivation can't be asynchronous"
            )
        if versions := versions_of(source.settings, made.of.name):
            raise IllegalState(
                f"version {versions[-1]} of derivation {made.of.name!r} of {made.of.source} is in force, and its "
                "writers write its rows: take another name"
            )
        self._create(made, source, timeout, asynchronous=True)
        self._later[made.of] = made
        return made.table

    def _create(
        self,
        made: Function,
        source: r.StreamInfo,
        timeout: float | None,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Create the derived table unless it exists; returns whether it is new. `StreamExists`: other settings."""
        is_new = False
        wanted = {TABLE: "true", DERIVED: Derived(made.of, made.unique, asynchronous).text}
        deadline = self._shared.deadline(timeout)
        try:
            found = self._session.describe(made.table, deadline)
        except UnknownStream:
            kept = {n: v for n, v in source.settings.items() if n == VERSIONS_MS}
            command = r.CreateStream(made.table, len(source.segments), wanted | kept, adopt=False)
            found, is_new = self._session.create_stream(command, deadline), True
        if unlike := differences(wanted, found.settings, only_asked=True):
            raise StreamExists(f"{made.table} exists, but {', '.join(unlike)}")
        return is_new

    def _source(self, source: str, timeout: float | None) -> r.StreamInfo:
        found = self._session.describe(source, self._shared.deadline(timeout))
        if TABLE not in found.settings:
            raise InvalidArgument(f"{source} is no table: a derivation has a table as its source")
        self._shared.derivations.learn(source, found.settings)
        return found

    def rebuild(self, source: str, name: str, timeout: float | None) -> str:
        functions = self._shared.derivations.named(source, check_derivation(name))
        if not functions and (tables := self._tables_of_workers(source, name, timeout)):
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
        return table

    def _build(self, made: Function, timeout: float | None) -> None:
        """Bring a version into force, build its table, switch, and take the former version out of force."""
        of = made.of
        with self._replica(of.source, made.table, timeout=timeout) as replica:
            before = self._versions(of, timeout)
            if of.version not in before:
                self._check_unused(made, before, replica, timeout)
                self._move(of, "+", timeout)
            former = [of._replace(version=each) for each in before if each != of.version]
            state = replica.transact(lambda txn: _begin(txn, made), timeout=timeout).value
            if state is not None:
                with replica.snapshot() as view:
                    keys = (key for key, _ in view.scan(of.source))
                    while piece := list(islice(keys, _PIECE)):
                        replica.transact(partial(_build_piece, made=made, keys=piece))
                replica.transact(lambda txn: _switch(txn, made, former, state), timeout=timeout)
        for each in former:
            self._move(each, "-", timeout)

    def _versions(self, of: r.Derivation, timeout: float | None) -> tuple[int, ...]:
        return versions_of(self._source(of.source, timeout).settings, of.name)

    def _check_unused(
        self, made: Function, before: Sequence[int], replica: Replica, timeout: float | None
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
        if not set(gone) <= set(there):
            raise InvalidArgument(
                f"{source} has versions {list(there)} of derivation {name!r} in force"
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
        self, source: str, name: str, function: IndexFunction | None, timeout: float | None
    ) -> list[str]:
        check_derivation(name)
        known = self._shared.derivations
        later = [derived_table(each.of) for each in self._tables_of_workers(source, name, timeout)]
        need("rocksdict", extra="tables")
        from anabranch.tables.snapshot import in_use

        tables = dict.fromkeys([source, *later])
        with self._replica(*tables, timeout=timeout) as replica, replica.snapshot() as view:
            derived = in_use(view, name)
            if derived is None:
                raise DerivationMissing(f"{source} has no derivation {name!r} that is built")
            made = self._later.get(derived.of)
            if function is not None:
                made = function_of(derived.of, function, unique=derived.unique)
            return list(islice(compared(view, made or known.function(derived.of)), _MOST_SHOWN))


def function_of(of: r.Derivation, function: IndexFunction, *, unique: bool) -> Function:
    """A version of a derivation, with a user's function. Raises: InvalidArgument, NotInstalled."""
    need("rocksdict", extra="tables")
    from anabranch.tables.indexes import Indexed

    if not callable(function):
        raise InvalidArgument(
            f"derivation {of.name!r}: {function!r:.100} is no function of key and row"
        )
    return Function(of, unique, Indexed(of.source, of.name, function).of)


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


def _begin(txn: TableTransaction, made: Function) -> bytes | None:
    """Make the state `building`; returns the state to switch from, or None if the table is ready."""
    state = txn.get(made.table, STATE_KEY)
    if state == READY:
        return None
    if state == RETIRED:
        raise IllegalState(f"{made.table} was in force before: take a higher version")
    if state is None:
        state = BUILDING + os.urandom(_NONCE)
        txn.write_entries(made.of, ((STATE_KEY, state),))
    return state


def _retire(txn: TableTransaction, of: r.Derivation) -> None:
    txn.write_entries(of, ((STATE_KEY, RETIRED),))


def _build_piece(txn: TableTransaction, made: Function, keys: Iterable[bytes]) -> None:
    for key in keys:
        entries = made.entries(key, txn.get(made.of.source, key))
        if made.unique:
            txn.check_unique(made, entries, key)
        txn.write_entries(made.of, entries.items())


def _switch(
    txn: TableTransaction, made: Function, retired: Iterable[r.Derivation], state: bytes
) -> None:
    found = txn.get(made.table, STATE_KEY)
    if found == READY:
        return  # another process was first
    if found != state:
        raise IllegalState(
            f"{made.table} was dropped or made again while it was built: build it again"
        )
    txn.write_entries(made.of, ((STATE_KEY, READY),))
    for of in retired:
        _retire(txn, of)
