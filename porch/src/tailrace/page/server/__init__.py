"""The live page: a server on the loopback interface, for one person with a token.

In: requests of the page, with a token (`guard`). Out: files, JSON (`answers`) and events.
Rule: every request passes the guard first. Answers have no more points than a page can show.
"""
