"""Names for every tensor of a traced program, and the rewrite that makes a tap an output."""
