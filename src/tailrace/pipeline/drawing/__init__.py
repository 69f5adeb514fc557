"""Plans as text and as SVG."""
