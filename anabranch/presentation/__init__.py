"""Data for people, which the command line and the web page show alike.

- `rows`: streams, transactions, groups, processors and rows of system tables as dictionaries of JSON values;
  numbers, times and names as texts. Start here.
- `system_tables`: the rows of `Client.system`: transactions, locks, commits, tables and versions.
- `history`: reads the newest part of a stream's history, and draws it as SVG.

Modules here may import `reading`, types of `tables` and the layers under them, but never `client`. They print
nothing.
"""
