"""`anabranch spark`: `commands` has the options of all jobs and the audit; `pipelines` has load, export, compact.

Only the functions of commands import PySpark, `anabranch.spark` and `anabranch.audit`.
"""
