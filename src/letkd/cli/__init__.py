"""The command line: one file per command. torch is imported only when a command needs it."""
