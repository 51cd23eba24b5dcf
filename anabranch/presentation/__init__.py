"""Data prepared for people: rows of lists, system tables, histories and pictures of streams, and their words.

The command line and the web page show the same rows; programs get the system tables from `Client.system`. Modules
here may import `reading`, types of `tables` and the layers under them, but never `client`. They print nothing.
"""
