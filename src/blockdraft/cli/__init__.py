"""The command line: a table of verbs, flags made from settings, results as tables or JSON."""
