"""Operations on a processor as a whole: `copies` of it, and the `topology` of its program."""
