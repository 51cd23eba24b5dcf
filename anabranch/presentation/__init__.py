"""Data for people: rows of lists, system tables, histories and pictures of streams, in words, numbers and times.

The command line and the web page show the same rows; programs get the system tables by `Client.system`. Modules
here may import `reading`, types of `tables` and what is below them, never `client`, and they print nothing.
"""
