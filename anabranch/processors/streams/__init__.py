"""Work on streams outside of rounds: create, grow, truncate and delete topics, scale, count foreign records."""
