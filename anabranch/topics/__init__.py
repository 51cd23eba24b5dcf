"""Topics: their names, and how each kind is declared."""
