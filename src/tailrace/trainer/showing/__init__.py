"""How a trainer shows itself: a summary of what is trained, its print, an optimizer in words.

In: an engine. Out: text and HTML. Rule: reads shapes and options; nothing runs on a device.
"""
