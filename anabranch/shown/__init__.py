"""Words, histories and pictures of streams, as the shell and the browser both show them."""
