"""A run or a comparison as one self-contained HTML file, and as Markdown. No torch."""
