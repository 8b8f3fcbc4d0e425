"""What tells whoever changes the library that the rest is as it was."""
