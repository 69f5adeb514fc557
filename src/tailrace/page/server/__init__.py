"""The live page: a server on the loopback interface, for one person with a token."""
