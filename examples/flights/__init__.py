"""A demonstration on real data, with kills, checked row by row: ``python -m examples.flights``.

``story`` has the steps, in order. Each process of it plays a role in ``child``; ``cast`` starts the roles, and
``processes`` is the parent's side. ``checks`` judges the messages and notes of the roles.
"""
