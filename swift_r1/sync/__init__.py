"""Both halves of the weight protocol: `writer.py` sends a version out of a `snapshot.py` or GPU memory; `update.py` is
the server's state machine, `staging.py` its files, and `server.py` joins these to an engine and passes them on."""
