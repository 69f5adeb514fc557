"""How a trainer shows itself: a summary of what is trained, its print, an optimizer in words."""
