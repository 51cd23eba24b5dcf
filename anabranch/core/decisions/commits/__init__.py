"""Decisions on commits: whole transactions in one command, by journals, and what moves with them."""
