"""Data between host and device: the infeed and the outfeed.

In: datasets (`data`), or blocks of elements that a caller passes in; and the values a program sends
out.
Out: blocks of elements on the device (`feed.Staged`), and sent values in the order they were sent.

    feed             the interface a program reads from; HandedFeed for callers that have the elements
    elements         shape, dtype and structure of an element, and passing it to a function
    infeed           a dataset as a queue for programs; staging reads ahead, in a thread
    reader           elements in order, in blocks of any size, with put-back
    blocks           what a block's rows are; buffers reuses their memory, transfer moves them
    device_dataset   blocks of datasets that are kept on the device: indices
    dispatch_table   the size of a dispatch: every tuned constant, with its measurement
    outfeed          values a program sent, on the host; sent_block has those of one execution
    waiting          waiting with a time limit; background is the only kind of thread
    benchmark        the speed of a dataset, and whether it is the bottleneck

Rules. Programs see a `Feed`, never a dataset. Only the infeed's thread may block inside a dataset;
everyone else waits for that thread, with a limit. A block on the host is never written again once a
device has it, since a CPU device aliases it.
"""
