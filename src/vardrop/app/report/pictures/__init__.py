"""Pictures: each is a function on data that returns a matplotlib Axes, also in a notebook.

Without `ax` a picture is drawn on a figure of its own, which `ax.figure` shows in a notebook.
"""
