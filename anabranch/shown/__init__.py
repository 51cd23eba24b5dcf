"""Words, histories, pictures of streams and system tables, as programs, the shell and the browser show them."""
