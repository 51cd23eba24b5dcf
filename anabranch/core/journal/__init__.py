"""The journal index: what writers have written, where, and how much of it."""
