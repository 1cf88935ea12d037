"""report.html: one file that shows runs to a person, with charts and without a network. Imports no torch."""
