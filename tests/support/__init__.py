"""What several test files share, and the programs that tests start."""
