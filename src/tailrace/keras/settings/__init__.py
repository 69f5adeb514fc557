"""What `set_pipelining_options` and its sisters accept."""
