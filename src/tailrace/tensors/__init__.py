"""Names and sight inside a program: reading it, and emitting it again with values sent out."""
