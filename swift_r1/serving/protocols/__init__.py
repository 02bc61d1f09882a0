"""Other protocols than chat completions, at the address of a session: each is put into the words of a chat and back, so
that there is one way of generating and recording."""
