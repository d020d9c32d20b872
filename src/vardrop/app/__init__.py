"""The application: everything about runs on disk. The library never imports it."""
