"""Declarations of topics, and the log itself: raw fetch, splice, transactional append, admin."""
