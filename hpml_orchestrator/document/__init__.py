"""Reports as plain data, and their text, Markdown and HTML."""
