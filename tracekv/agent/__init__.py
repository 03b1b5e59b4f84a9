"""The reader of journals: follows them, runs the views and exports what they make."""
