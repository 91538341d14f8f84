"""A draft worker: one small model that guesses what others' sequences go on with, on a device of
its own."""
