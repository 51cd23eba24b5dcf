"""The audit: a check, on Spark, that the logs of a scope agree with each other (`docs/spark.md`, "Audit").

Start in `run`, which asks for the ends of the topics in the right order, reads them, and calls all checks. `report`
has the table of checks (`CHECKS`): what each counts, what has to hold, what a breach concerns, and what to do about
it.

- `log` reads topics in Spark's tasks, and `kernel` is its compiled walk over record batches; `tables` makes rows of
  history and status records.
- `history`, `status`, `events` and `journal` are the checks. Each has tables of rules (`findings.Rule`): SQL that
  is true of a wrong row, and texts of what was expected and found.
- `findings` lets Spark apply rules, count, and take examples.

The audit judges the rest of anabranch, so it stays independent of that code. Both share the fetching and unpacking
of batches, and the records' schemas, but no kernel, checksum or hash. Modules here may import `spark.options`,
`kafka` and `ledger` besides `core`, `schemas` and `batches`. The command line alone imports the audit.
"""
