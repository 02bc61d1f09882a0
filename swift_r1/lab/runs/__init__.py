"""Reading a run's folder, while it grows or long after; nothing is ever written into it. Importing it
loads nothing heavy."""
