"""Tables: versions of rows in RocksDB, written by a replica and read at snapshots (docs/inside/tables.md)."""

from anabranch.extras import need

need("rocksdict", extra="tables")
