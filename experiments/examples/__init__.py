"""Programs to run and to read: the library as a user of it would call it."""
