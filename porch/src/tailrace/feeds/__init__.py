"""Host and device: the infeed and the outfeed.

In: datasets (`data`) or blocks that a caller has; and what a program sends out.
Out: blocks of elements on the device (`feed.Staged`), and outputs in the order they were sent.

    feed         the interface of what a program reads; HandedFeed for callers with blocks
    infeed       reads a dataset ahead in a thread; reader stacks, buffers and transfer move
    outfeed      what a program sent, on the host
    waiting      waiting with a limit; background is the one kind of thread

Rule: programs see `Feed`, never a dataset. Only the infeed's thread waits inside a dataset.
"""
