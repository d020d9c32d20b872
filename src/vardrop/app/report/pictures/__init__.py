"""Pictures: functions on data that return a matplotlib Axes.

Without `ax` a picture is drawn on a new figure, which `ax.figure` shows in a notebook.
"""
