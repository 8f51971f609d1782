"""What the commands show: tables and plots."""
